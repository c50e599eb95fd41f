# A base for trainers: stepkeeper with torch, in the locked versions. For GPUs: --build-arg EXTRAS=torch,gcs --build-arg MORE=
ARG PYTHON=3.11
FROM python:${PYTHON}-slim
ARG EXTRAS=xla,gcs
# torch_xla's devices.
ARG MORE=torch_xla[tpu]
WORKDIR /src
COPY . ./
RUN grep -oE '^[A-Za-z0-9_.-]+==[^ ]+' requirements.lock > constraints \
    && python -m pip install --no-cache-dir --disable-pip-version-check -c constraints ".[${EXTRAS}]" ${MORE} \
    && rm -rf /src/*
ENV PYTHONUNBUFFERED=1 LANG=C.UTF-8
WORKDIR /app
CMD ["python"]
