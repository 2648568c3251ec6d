# The benchmark on a CPU. In a clone of this repository:
#     docker build -t twinbench .
#     docker run --rm -v "$PWD/results:/twinbench/results" twinbench --effort quick -k mixed_precision
# What stands after the name goes to pytest. --cpus and --memory limit it: it measures what fits.
FROM python:3.13-slim
# The compiler is that of torch.compile; iproute2 makes the links of `twinbench network hosts`.
RUN apt-get update && apt-get install -y --no-install-recommends g++ iproute2 && rm -rf /var/lib/apt/lists/*
WORKDIR /twinbench
COPY . .
RUN pip install --no-cache-dir -c constraints.txt -e '.[torch,tensorflow]'
ENTRYPOINT ["pytest", "bench/", "--benchmark-only"]
CMD ["--effort", "quick"]
