# compress on processors alone, as a user without rights:
#   docker build --build-arg TORCH_INDEX=URL --tag compress .     URL: PyTorch's index of CPU wheels (docs/container.md)
#   docker run --rm --volume "$PWD:/work" compress distill --teacher minilm --data intents --out runs/first
ARG PYTHON=python:3.11.14-slim-bookworm

FROM ${PYTHON} AS build
ARG TORCH_INDEX
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1
RUN python -m venv /venv
WORKDIR /source
COPY requirements/base.txt requirements/
RUN /venv/bin/pip install --no-deps --require-hashes -r requirements/base.txt
RUN /venv/bin/pip install --no-deps --index-url "${TORCH_INDEX:?give --build-arg TORCH_INDEX}" torch==2.13.0+cpu
COPY pyproject.toml README.md LICENSE ./
COPY recipes recipes
COPY compress compress
RUN /venv/bin/pip install --no-deps --no-build-isolation .
# in parallel, and once: a user without rights could not keep it
RUN /venv/bin/python -m compileall -qq -j 0 /venv/lib || true

FROM ${PYTHON}
COPY --from=build /venv /venv
RUN useradd --uid 1000 --create-home compress && install --directory --owner compress /work
ENV PATH=/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1
USER compress
WORKDIR /work
ENTRYPOINT ["compress"]
CMD ["--help"]
