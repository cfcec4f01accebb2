#!/bin/bash
# Open MPI, one process on each host:
#   HOSTS=node0,node1 launch/mpirun.sh --config gpt_d24 run.directory=/shared/runs
# Its variables number the processes; the first host has the coordinator (at PORT).
set -eu
IFS=, read -ra hosts <<< "${HOSTS:?HOSTS=node0,node1,... are the hosts to run on}"
exec mpirun -np "${#hosts[@]}" --host "$HOSTS" --map-by ppr:1:node --bind-to none --tag-output \
    python -u -m jaxtrain.main --coordinator "${hosts[0]}:${PORT:-7777}" "$@"
