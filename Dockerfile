# The benchmark on a CPU. In a clone of this repository:
#     docker build -t twinbench .
#     docker run --rm -v "$PWD/results:/twinbench/results" twinbench --effort quick -k mixed_precision
# Arguments after the name go to pytest. With --cpus and --memory it measures what fits.
FROM python:3.13-slim
# torch.compile needs the compiler, `twinbench network hosts` iproute2.
RUN apt-get update && apt-get install -y --no-install-recommends g++ iproute2 && rm -rf /var/lib/apt/lists/*
WORKDIR /twinbench
COPY . .
RUN pip install --no-cache-dir -c constraints.txt -e '.[torch,tensorflow]'
ENTRYPOINT ["pytest", "bench/", "--benchmark-only"]
CMD ["--effort", "quick"]
