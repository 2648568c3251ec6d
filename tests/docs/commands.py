"""How each command of the pages is checked; one that is not here fails."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

BENCH = ".venv/bin/pytest bench/ --benchmark-only"
RECIPES = ("schedules", "learning_rate_finder", "regularization", "initialization")
RECIPES += ("gradient_health",)
RECIPES += ("augmentation", "averaging", "checkpoints", "data_checks", "loss_checks", "nonfinite")
# What else comes by name: tests/test_headline.py holds it to the techniques.
BY_NAME = ("accumulated_statistics", "accuracy_aware_quantization", "adversarial")
BY_NAME += ("batch_size_finder", "bottleneck", "combinations")
BY_NAME += ("discrepancy", "early_stopping", "feature_distillation")
BY_NAME += ("fine_tuning", "finite_guard", "frozen_inference")
BY_NAME += ("keras_backend", "loss_scaling", "memory_growth", "model_parallel")
BY_NAME += ("native_export", "profiling", "reduced_precision")
BY_NAME += ("semi_structured_pruning", "serving_threads", "shards")
BY_NAME += ("sparse_inference", "stacking", "structured_pruning")
BY_NAME += ("tensor_parallel", "varying_lengths", "weight_quantization")
TWO = "--pt-python .venv-pt/bin/python --tf-python .venv-tf/bin/python"
HOSTS = ".venv/bin/twinbench network hosts"
PROJECTED = ".venv/bin/twinbench network projection docs/across_hosts/pt.json"
PROJECTED += " docs/across_hosts/tf.json"
MAKE = "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e"
BOTH = "'.[torch,tensorflow]'"
ON_MANY = (
    "{0}_impl.kit.replicas {0}_impl.parallel.data_parallel:processes "
    "{0}_impl.kit.examples:digits_cnn data/digits "
    "--global-batch 128 --steps 500 --out result.npz"
)
CLUSTER = '{"cluster":{"worker":["host1:29400","host2:29400"]},"task":{"type":"worker","index":0}}'
MUTANTS = "tests/validation/cosmic-ray.toml mutants.sqlite"
OF_A_STEP = ("mixed_precision", "compilation", "memory_format", "optimizer_implementations")
OF_A_STEP += ("activation_checkpointing",)
STEPS = " ".join(f"bench/train_step/bench_{name}.py" for name in OF_A_STEP)
SAVING = "--checkpoint saved --save-every 100"

COMMANDS = {
    # It would install: what it installs is checked below, or by other tests.
    "install": (
        f"{MAKE} {BOTH}",
        f"{MAKE} {BOTH} && {BENCH}",
        f"{MAKE} '.[dev]' && .venv/bin/pytest",
        ".venv/bin/pip install pre-commit && .venv/bin/pre-commit install",
        "python3 -m venv .venv-pt && .venv-pt/bin/pip install -e '.[torch]'",
        "python3 -m venv .venv-tf && .venv-tf/bin/pip install -e '.[tensorflow]' "
        "'tensorflow[and-cuda]'",
        "python3 -m venv .venv && .venv/bin/pip install -e .",
        "python3 -m venv .venv-edge && .venv-edge/bin/pip install '.[edge]' "
        "-c constraints-edge.txt",
        ".venv-pt/bin/pip install hypothesis pytest-timeout nvidia-ml-py",
    ),
    # It would measure for long, or tests: its options are, by a run that only collects.
    "collect": (
        BENCH,
        f"{BENCH} --effort quick -k mixed_precision",
        f"{BENCH} --resume",
        "pytest bench/ --resume",
        "pytest bench/ --benchmark-only --plan",
        f"{BENCH} --technique averaging --variant ema",
        f"{BENCH} --technique onednn",
        f"{BENCH} --technique export --variant litert,executorch --pt-python .venv-edge/bin/python",
        f"{BENCH} --technique {','.join(RECIPES)}",
        f"{BENCH} --technique {','.join(BY_NAME)}",
        f"{BENCH} {TWO} --effort quick -k mixed_precision",
        f"{BENCH} {TWO} --memory-budget 8GB",
        f".venv-pt/bin/pytest {STEPS} --benchmark-only --framework pt --minutes 12",
        f"CUDA_VISIBLE_DEVICES=1 {BENCH} {TWO}",
        f"CUDA_VISIBLE_DEVICES= {BENCH} {TWO}",
    ),
    # It is run, where results/latest is the run that is published in docs/.
    "run": (
        ".venv/bin/twinbench report results/latest",
        ".venv/bin/twinbench report results/latest --format terminal",
        ".venv/bin/twinbench report docs --format markdown",
        ".venv/bin/twinbench report docs --readme README.md",
        ".venv/bin/twinbench choose results/latest",
        ".venv/bin/twinbench claims results/latest",
        ".venv/bin/twinbench priorities results/latest",
        ".venv/bin/twinbench claims docs docs/recipes docs/recipes/averaging.json --write",
        "cp results/latest/results.json docs/recipes/averaging.json",
        "cp results/latest/results.json docs/recipes/results.json",
        "cp results/latest/results.json docs/by_name/results.json",
        ".venv/bin/twinbench report docs/recipes --format markdown",
        ".venv/bin/twinbench report docs/by_name --format markdown",
        ".venv/bin/twinbench priorities docs --write",
        ".venv/bin/twinbench compare docs results/before results/latest",
        ".venv/bin/twinbench choose results/latest --goal train-speed --max-accuracy-drop 0.5",
        ".venv/bin/twinbench choose results/latest --goal train-speed --steps 1000",
        ".venv/bin/twinbench choose results/latest --goal memory --task digits-cnn",
        ".venv/bin/twinbench compare docs/results.json results/latest",
        ".venv/bin/twinbench machines add results/latest --headline --replace",
        ".venv/bin/twinbench diagnose my_step.py",
        ".venv/bin/python -m shared.utilization -m pt_impl.diagnosis.profiling",
        ".venv/bin/twinbench validate replay docs",
        PROJECTED,
        ".venv/bin/twinbench network projection docs/across_hosts/pt.json "
        "--bandwidth 100gbit --latency 10us --compute 250ms --size 3GB",
        f"{PROJECTED} --page docs/across_hosts.md",
    ),
    # It is run by the test of the tour, with the tour's files.
    "tour": (
        ".venv/bin/twinbench docs",
        ".venv/bin/python -m pt_impl.train_step.label_smoothing",
        ".venv/bin/python -m tf_impl.train_step.label_smoothing",
        ".venv/bin/pytest tests/test_layout.py tests/train_step/test_label_smoothing.py",
        f"{BENCH} --effort quick -k label_smoothing",
    ),
    # It is about a file of the user's: tests/harness/test_try.py runs it on the example.
    "own": (
        ".venv/bin/twinbench try --example my_model.py",
        ".venv/bin/twinbench try my_model.py",
        ".venv/bin/twinbench doctor my_model.py",
        ".venv/bin/twinbench port my_model.py",
        ".venv/bin/twinbench why my_model.py",
        ".venv/bin/twinbench why before/results.json results/latest",
        f"{BENCH} --model my_model.py --minutes 12",
        ".venv/bin/twinbench compare before/results.json results/latest --fail-if slower:5%",
    ),
    # It is run by a fork, in PyTorch alone but in campaigns; the rest has tests/diagnosis.
    "diagnose": (".venv/bin/twinbench diagnose digits-cnn --batch-size 4",),
    # It asks each framework in a new process: tests/diagnosis/test_doctor.py has forks asked.
    "doctor": (".venv/bin/twinbench doctor",),
    # A program that is no part of this project.
    "outside": (
        ".venv/bin/python -m cProfile -s cumtime -m pt_impl.diagnosis.profiling",
        f".venv/bin/pip install cosmic-ray && .venv/bin/cosmic-ray init {MUTANTS} && "
        ".venv/bin/cr-filter-operators mutants.sqlite tests/validation/cosmic-ray.toml",
        f".venv/bin/cosmic-ray exec {MUTANTS} && .venv/bin/cr-report mutants.sqlite",
        "nvidia-smi --query-gpu=clocks.max.sm --format=csv",
        "sudo nvidia-smi --lock-gpu-clocks=1200",
        ".venv-pt/bin/python -m pytest tests/test_gpu.py",
        ".venv-pt/bin/python -m tests.zoo --framework pt --device cuda",
    ),
    # It trains for minutes: that its file can be run is.
    "alone": (".venv/bin/python -m pt_impl.train_step.mixed_precision",),
    # It would measure for long: its options are parsed.
    "validate": (
        ".venv/bin/twinbench validate measure --minutes 30",
        ".venv-pt/bin/twinbench validate measure --framework pt",
    ),
    # It would measure for long: its options are parsed, and its ladder is there.
    "climb": (
        ".venv/bin/twinbench ladder image_classification",
        ".venv/bin/twinbench ladder --resume results/ladders/latest",
    ),
    # It would draw runs for a minute: it is run, but draws few.
    "simulate": (
        ".venv/bin/twinbench validate simulate results/latest/validation.json",
        ".venv/bin/twinbench validate simulate docs",
    ),
    # It would take minutes: that its options are there, is.
    "help": (
        ".venv/bin/twinbench why text-gpt-10m",
        ".venv/bin/twinbench why results/latest --write",
        ".venv/bin/twinbench why digits-cnn --technique mixed_precision --framework tf",
        ".venv/bin/twinbench validate disturbances --minutes 30",
        ".venv/bin/twinbench validate overhead",
        ".venv/bin/twinbench validate leaks",
        ".venv/bin/twinbench validate mutations",
        ".venv/bin/twinbench validate mutations --drawn 50 --of bench/analysis",
    ),
    # It would take an hour, or another test does it: that it starts, and has help, is.
    "long": (
        ".venv/bin/python -m tests.zoo",
        ".venv/bin/python -m bench.docs.website results/site",
    ),
    # It is run where network namespaces are permitted.
    "hosts": (
        f"{HOSTS} 'echo host $RANK of $WORLD_SIZE; ip -brief address'",
        f"{HOSTS} --hosts 3 --latency 5ms --bandwidth 100mbit "
        "'.venv/bin/python -m pt_impl.kit.collectives --floats 1000,500000'",
        f"{HOSTS} --bandwidth 1gbit "
        "'.venv/bin/python -m tf_impl.kit.collectives --floats 1000,500000'",
    ),
    # It would measure for minutes: its arguments are parsed.
    "sweep": (
        ".venv/bin/twinbench network sweeps --framework pt results/pt.json",
        ".venv/bin/twinbench network sweeps --framework tf results/tf.json",
    ),
    # It needs a cluster: tests/docs/test_many_machines.py checks what it starts.
    "cluster": (
        "sbatch --constraint=KIND --array=0-4 docs/many_machines/slurm.sh KIND",
        "kubectl apply -f docs/many_machines/kubernetes.yaml",
        ".venv/bin/twinbench report results/KIND/*/latest",
    ),
    # It needs several hosts: its options are parsed, and what it names is there.
    "launch": (
        "torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-id=run1 "
        f"--rdzv-endpoint=host1:29400 -m {ON_MANY.format('pt')} {SAVING}",
        f"TF_CONFIG='{CLUSTER}' python -m {ON_MANY.format('tf')} {SAVING}",
        "srun torchrun --nnodes=$SLURM_NNODES --nproc-per-node=1 --rdzv-backend=c10d "
        "--rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$SLURM_LAUNCH_NODE_IPADDR:29400 -m "
        f"{ON_MANY.format('pt')}",
    ),
}
RARE = ("CUDA_VISIBLE_DEVICES", TWO, "collectives", "shared.utilization", "diagnose my_step.py")
RARE += (
    "report docs/recipes",
    "report docs/by_name",
    "claims results/latest",
    "priorities results/latest",
)
RARE += ("docs/results.json results", "machines add")


def parameters(texts: Iterable[str]) -> list:
    """Commands as parameters; rare ones in campaigns alone."""
    campaign = pytest.mark.campaign
    return [
        pytest.param(text, marks=campaign if any(words in text for words in RARE) else ())
        for text in texts
    ]
