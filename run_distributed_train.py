"""Train from a checkout: `python run_distributed_train.py --worker_num 4` is `aworld train --worker_num 4`."""

import sys

from aworld_runtime.cli.command_line import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
