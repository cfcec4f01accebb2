"""`jaxtrain serve`: a trained model behind HTTP, as OpenAI's API has it (extra `serve`).

serve.py starts the process; app.py has the routes; engine_thread.py drives the engine. Nothing
outside of this folder imports Starlette, uvicorn or prometheus-client.
"""
