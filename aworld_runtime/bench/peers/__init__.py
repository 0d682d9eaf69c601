"""Other event buses under the same load, each as its own documentation recommends for throughput.

Scripts, run one at a time by an interpreter that has the peer (`requirements/bench-peers.txt`), which need not have this
product: they import nothing of it. Type checkers leave them out, since the peers aren't installed beside the product.
"""
