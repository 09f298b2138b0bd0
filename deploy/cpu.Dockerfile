# csps on CPUs: `docker build -f deploy/cpu.Dockerfile -t csps .` in a checkout.
FROM python:3.12.12-slim-bookworm AS build
WORKDIR /csps/source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /csps/dist .

FROM python:3.12.12-slim-bookworm
# LightGBM needs OpenMP from the system. No compiler: attention on CPUs is compiled by llvmlite.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /csps/dist /csps/dist
COPY constraints.txt /csps/constraints.txt
# PyTorch's builds for CPUs: PyPI's bring gigabytes of CUDA.
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    -c /csps/constraints.txt /csps/dist/*.whl
# The cache of models, so that a volume mounted there is this user's.
RUN useradd --uid 1000 --create-home csps && install -d -o csps /home/csps/.cache
USER 1000
WORKDIR /home/csps
EXPOSE 8000
ENTRYPOINT ["csps"]
CMD ["serve", "--block", "--no-demo", "--host", "0.0.0.0"]
