export CUDA_HOME=/tmp/castsvenv/lib/python3.12/site-packages/nvidia/cu13
export PATH=$CUDA_HOME/bin:$PATH
export XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir=$CUDA_HOME $XF"
W=/work/wt/stream
PYTHONPATH=$W:$W/kernels:/work/main/.venv/lib/python3.12/site-packages timeout 600 /tmp/castsvenv/bin/python $W/stream_old/lower3.py "$@"
