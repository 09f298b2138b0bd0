# csps on NVIDIA GPUs: `docker build -f deploy/gpu.Dockerfile -t csps-gpu .` in a checkout. The
# machine needs a driver and the NVIDIA container toolkit; torch's wheels bring CUDA and NCCL.
FROM python:3.12.12-slim-bookworm AS build
WORKDIR /csps/source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /csps/dist .

FROM python:3.12.12-slim-bookworm
# Triton compiles the code that launches its kernels when they first run.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libgomp1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /csps/dist /csps/dist
COPY constraints.txt /csps/constraints.txt
RUN pip install --no-cache-dir -c /csps/constraints.txt /csps/dist/*.whl
# The cache of models, so that a volume mounted there is this user's.
RUN useradd --uid 1000 --create-home csps && install -d -o csps /home/csps/.cache
USER 1000
WORKDIR /home/csps
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 8000
ENTRYPOINT ["csps"]
CMD ["serve", "--block", "--no-demo", "--host", "0.0.0.0"]
