# The GPU image, from the repository's root:
#   docker build --build-arg CUDA_ARCHS="9.0;10.0" --tag megatron-tree .
# Versions: requirements/gpu.txt for wheels, requirements/gpu-source.txt for what is built here; `make check-image-pins`
# checks both. CUDA has the minor version of torch's wheel, or Apex refuses to build.

FROM nvidia/cuda:13.0.2-devel-ubuntu24.04 AS base
# Compiler and headers stay: Triton and FlashInfer compile kernels while they run. libibverbs: NCCL over InfiniBand.
# pgrep (procps): examples/launch/node.sh. wget: the health probes that KubeRay adds.
# hadolint ignore=DL3008 # Ubuntu's archive keeps the newest patch of a package only
RUN apt-get update \
 && apt-get install --yes --no-install-recommends \
      ibverbs-providers libibverbs1 procps python3.12 python3.12-dev python3.12-venv wget \
 && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH

FROM base AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008 # as above
RUN apt-get update \
 && apt-get install --yes --no-install-recommends git \
 && rm -rf /var/lib/apt/lists/* \
 && python3.12 -m venv /opt/venv
COPY requirements/gpu.txt /tmp/requirements/
RUN pip install --no-cache-dir --no-deps --requirement /tmp/requirements/gpu.txt

# Compute capabilities of the GPUs it will run on: 8.0 A100, 9.0 H100 and H200, 10.0 B200.
ARG CUDA_ARCHS="9.0;10.0"
# Compilers at once; each may take 4 GiB.
ARG BUILD_JOBS=8
COPY requirements/gpu-source.txt /tmp/requirements/
# cuDNN's and NCCL's headers are those of the wheels that torch loads. FORCE_BUILD: no prebuilt wheel of some other
# torch. NCCL_EP is for mixtures of experts. The APEX variables choose its C++ and CUDA extensions.
RUN nvidia=/opt/venv/lib/python3.12/site-packages/nvidia \
 && without_dots="$(echo "$CUDA_ARCHS" | tr -d .)" \
 && export CPATH="$nvidia/cudnn/include:$nvidia/nccl/include" MAX_JOBS="$BUILD_JOBS" \
      TORCH_CUDA_ARCH_LIST="$CUDA_ARCHS" NVTE_CUDA_ARCHS="$without_dots" \
      NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_WITH_NCCL_EP=0 \
      APEX_CPP_EXT=1 APEX_CUDA_EXT=1 APEX_PARALLEL_BUILD="$BUILD_JOBS" \
 && pip install --no-cache-dir --no-deps --no-build-isolation --requirement /tmp/requirements/gpu-source.txt
COPY . /opt/megatron-tree
RUN pip install --no-cache-dir --no-deps --no-build-isolation /opt/megatron-tree

FROM base
# Who owns the mounted folders: runs are written as this user.
ARG USER_ID=1000
RUN if id ubuntu > /dev/null 2>&1; then userdel --remove ubuntu; fi \
 && useradd --create-home --uid "$USER_ID" --shell /bin/bash tree
COPY --from=build /opt/venv /opt/venv
COPY . /opt/megatron-tree
USER $USER_ID
WORKDIR /opt/megatron-tree
# It imports torch, Megatron-Core and vLLM, so it is asked seldom and may take long.
HEALTHCHECK --interval=30m --timeout=5m --start-period=5m --retries=2 CMD ["megatron-tree", "doctor"]
CMD ["megatron-tree", "doctor"]
