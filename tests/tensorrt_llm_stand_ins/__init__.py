"""Stand-ins for what NVIDIA's image has, for machines without it.

llm_api               the package `tensorrt_llm`: its LLM API, over the torch runtime
llm_api_lines.py      what that API does differently from one release line to the next
triton_backend        the backend `tensorrtllm` of Triton, in Python, over the torch runtime
fake_trtllm_build.py  the program `trtllm-build`
fake_docker.py        `docker run` with the image, `docker kill` and `docker image inspect`

Each is written from NVIDIA's sources, which it names; what was not seen there, none of them shows.
"""
