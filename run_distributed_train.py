"""Train from a checkout: `python run_distributed_train.py --worker_num 4`. The same as `aworld train`."""

from aworld_runtime.training.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
