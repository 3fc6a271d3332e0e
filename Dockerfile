# Planning, simulation, search and routing: docker build -t libra . && docker run --rm libra plan --help
# For `libra run`, build with --build-arg EXTRAS=aic,cpu (or gpu on an image with CUDA).
FROM python:3.12-slim AS wheel
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir "setuptools>=77" wheel "mypy>=2.0" types-PyYAML
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY src src
COPY examples examples
RUN LIBRA_COMPILED=1 pip wheel --no-build-isolation --no-deps -w /dist .

FROM python:3.12-slim
ARG EXTRAS=aic,http,ilp,report
COPY --from=wheel /dist /dist
RUN pip install --no-cache-dir "$(echo /dist/*.whl)[$EXTRAS]" && rm -r /dist
RUN useradd --create-home libra
USER libra
WORKDIR /home/libra
ENTRYPOINT ["libra"]
CMD ["--help"]
