# The operator: its locked packages and this tree's wheel, without torch. Any user that isn't root can run it.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim AS build
ARG PIP="python -m pip install --no-cache-dir --disable-pip-version-check --no-deps --no-compile"
WORKDIR /src
COPY requirements-operator.lock ./
RUN ${PIP} --require-hashes --target=/opt/packages -r requirements-operator.lock
COPY . ./
RUN ${PIP} --target=/opt/stepkeeper .
# The root file system is read-only where it runs. Some packages have templates that don't compile.
RUN rm -rf /opt/*/bin; python -m compileall -qq --invalidation-mode=unchecked-hash /opt || true

FROM python:${PYTHON}-slim
COPY --from=build /opt /opt
ENV PYTHONPATH=/opt/stepkeeper:/opt/packages PYTHONUNBUFFERED=1 LANG=C.UTF-8
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["python", "-m", "stepkeeper_operator"]
