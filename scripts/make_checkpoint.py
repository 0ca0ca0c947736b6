"""Make a small model with random weights and a real tokenizer, in seconds and without a network; see --help."""

import sys

from vllm_batch_invariant.check.checkpoint import main

if __name__ == "__main__":
    sys.exit(main())
