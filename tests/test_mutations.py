"""Each mutation of mutations.txt still has its line: one that does not apply proves nothing."""

from mutate import ROOT, read_mutations

MUTATIONS = read_mutations((ROOT / "tests" / "mutations.txt").read_text())


def test_each_mutation_applies_once_and_names_tests_that_are_there():
    assert len(MUTATIONS) > 100
    stale = [name for name, m in MUTATIONS.items() if (ROOT / m.file).read_text().count(m.old) != 1]
    tests = [(n, t) for n, m in MUTATIONS.items() for t in m.tests.split()]
    missing = [name for name, test in tests if not (ROOT / "tests" / test.split("::")[0]).is_file()]
    assert not stale and not missing
