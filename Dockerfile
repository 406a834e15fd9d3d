# Serves a converted checkpoint by vLLM on NVIDIA GPUs. Build the wheel first:
#
#   pip wheel --no-deps -w dist .
#   docker build -t leank .
#   docker run --gpus all --ipc=host -p 8000:8000 -v "$PWD/out:/out" leank /out
FROM vllm/vllm-openai:v0.33.0
COPY dist/*.whl /tmp/
# vLLM asks for a tilelang that is too old for the kernels.
RUN pip install --no-cache-dir /tmp/*.whl \
    && pip install --no-cache-dir --no-deps "tilelang==0.1.15" \
    && rm /tmp/*.whl
ENTRYPOINT ["vllm", "serve"]
