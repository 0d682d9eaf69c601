"""Each mutant still is a change of the product; whether it is noticed, `python -m tests.contracts.mutate` says."""

import pytest

from tests.contracts.mutants import MUTANTS, Mutant
from tests.contracts.mutate import PROJECT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.backend}: {mutant.why}")
def test_what_a_mutant_changes_stands_in_its_file_once(mutant: Mutant) -> None:
    assert (PROJECT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old
