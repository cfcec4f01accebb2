"""Tables of the benchmarks on the screen."""

import re

from rich.console import Console

from benchmarks import tables


def test_on_the_screen_rows_of_a_name_have_a_table_with_their_columns(capsys):
    one = {"shape": "1 x 8", "backend": "int8"}
    rows = [one | {"name": "engine", "ms": 2.0}, one | {"name": "first_token", "alone_ms": 3.0}]
    about = {"bench": "engine", "config": "gpt_d12", "variant": "fast", "device": "H200"}
    about |= {"device_count": 1}
    Console(width=80).print(tables.table_of(about | {"rows": rows, "peers": []}))
    title, first, second = re.split(r"\n\s*\n", capsys.readouterr().out.strip())[:3]
    assert title.strip() == "engine gpt_d12, 1 x 8, int8, fast, H200, this run"
    assert "ms" in first and "alone" not in first and "first_token" not in first
    assert "alone" in second and "engine" not in second
