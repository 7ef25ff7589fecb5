from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanoinfer.book import results as numbers
from nanoinfer.book.results import PLACEHOLDER, Number, Results, book_root, exact, ledger_table, machine_name, measured
from nanoinfer.errors import ChapterError, NanoinferError

PROVENANCE = {
    "machine": {"cpu": "AMD EPYC 7763", "cores": 2, "gpus": [{"name": "NVIDIA L40S"}]},
    "versions": {"python": "3.11.7", "torch": "2.9.0", "numpy": "2.4.6"},
    "date": "2026-01-05T10:11:12+00:00",
    "commit": None,
}
NB = "\u00a0"


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoinfer.measure.environment.provenance", lambda: json.loads(json.dumps(PROVENANCE)))


def make(
    root: Path | None = None, profile: str = "laptop", chapter: str = "05_kv_cache", device: str = "cpu"
) -> Results:
    return Results(chapter, profile=profile, model="smollm2-135m", device=device, dtype="float32", seed=1234, root=root)


@pytest.fixture
def book(tmp_path: Path) -> Path:
    (tmp_path / "_toc.yml").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("samples", "spec", "text"),
    [
        ([14.12, 13.81, 14.52], "", "14.1"),  # half the range is 0.36: one decimal
        ([4.12, 4.01, 4.25], "", "4.12"),  # half the range is 0.12: it begins with 1, so two
        ([1234.5, 1201.0, 1299.0], "", "1,234"),  # 49: whole numbers
        ([14.12345, 14.12346], "", "14.1"),  # never more than three digits
        ([14.12], "", "14.1"),
        ([5.0, 5.0], "", "5.00"),
        ([14.12, 13.81, 14.52], ".2f", "14.12"),
        ([14.12, 13.81, 14.52], "±", "14.1{nb}tok/s (13.8 to 14.5 in 3{nb}samples)"),
        ([14.12, 13.81, 14.52], "±.2f", "14.12{nb}tok/s (13.81 to 14.52 in 3{nb}samples)"),
        ([14.12], "±", "14.1{nb}tok/s (one run)"),
    ],
)
def test_samples_are_written_to_the_digits_that_their_spread_bears(samples: list[float], spec: str, text: str) -> None:
    results = make()
    results.add("rate", samples, unit="tok/s")
    expected = text.format(nb=NB) if "±" in spec else f"{text}{NB}tok/s"
    assert results.say(f"{{rate:{spec}}}").markdown == expected


def test_the_lower_median_is_the_value_and_all_samples_are_kept() -> None:
    results = make()
    results.add("rate", (x for x in [3, 1, 2, 10]), "tok/s", "tokens over seconds")
    assert results.numbers["rate"] == Number(2.0, "tok/s", "tokens over seconds", True, (3.0, 1.0, 2.0, 10.0))


def test_exact_numbers_units_and_ratios() -> None:
    results = make()
    results.add_exact("cache", 46_080, "B")
    results.add_exact("share", 12.5, "%")
    results.add_exact("reply", "a *star*, a_b and $5")
    results.add("speedup", 3.14159)
    said = results.say("{cache}, {share}, {speedup:.1f}x, {speedup:5.3f}, {{braces}}, {reply}").markdown
    assert said == f"46,080{NB}B, 12.5%, 3.1x, 3.142, {{braces}}, a \\*star\\*, a\\_b and \\$5"


def test_settings_are_names_too() -> None:
    assert make().say("{model} on {device}, {dtype}, seed {seed}").markdown == "smollm2-135m on cpu, float32, seed 1234"


@pytest.mark.parametrize(
    ("template", "markdown"),
    [
        ("It costs $0.20 in and $0.60 out.", r"It costs \$0.20 in and \$0.60 out."),
        (r"Already \$2 escaped.", r"Already \$2 escaped."),
        ("`$0.20` and $3", r"`$0.20` and \$3"),
        ("${price:.2f} an hour", r"\$2.50 an hour"),
        ("`{name}` and {name}", r"`a_b` and a\_b"),
    ],
)
def test_dollars_never_open_mathematics(template: str, markdown: str) -> None:
    results = make()
    results.add_exact("price", 2.5)
    results.add_exact("name", "a_b")
    assert results.say(template).markdown == markdown


def test_prose_is_markdown() -> None:
    said = make().say("Plain **bold**.")
    assert said._repr_mimebundle_() == {"text/markdown": "Plain **bold**.", "text/plain": "Plain **bold**."}
    assert repr(said) == "Plain **bold**."


def test_a_smoke_run_shows_no_measurement() -> None:
    results = make(profile="smoke")
    results.add("rate", [14.1, 14.3], "tok/s")
    results.add("price", 2.5)
    results.add_exact("cache", 46_080, "B")
    said = results.say("{rate:±}; {rate:.1f}x; ${price:.2f} is {verdict}; `{rate}`; {cache}", verdict="slower").markdown
    hidden = PLACEHOLDER
    assert said == f"{hidden}; {hidden}; {hidden} is {hidden}; `{hidden}`; 46,080{NB}B"
    assert results.provenance_line().markdown.endswith("nothing here is a measurement.")
    assert make().say("It is {verdict}.", verdict="slower").markdown == "It is slower."


@pytest.mark.parametrize("profile", ["smoke", "laptop"])
def test_missing_names_raise_and_offer_the_nearest(profile: str) -> None:
    results = make(profile=profile)
    results.add("speed_up", 2.0)
    with pytest.raises(
        NanoinferError, match="no result named 'speedup' in chapter '05_kv_cache': did you mean 'speed_up'"
    ):
        results.say("{speedup}")
    for sly in ("{speed_up.value}", "{speed_up[0]}", "{speed_up!r}", "{}", "{0}"):
        with pytest.raises(NanoinferError, match="no result named"):
            results.say(sly)


def test_a_bad_format_is_one_line() -> None:
    results = make()
    results.add("rate", 2.0)
    with pytest.raises(NanoinferError, match="result 'rate' cannot be written as 'd'"):
        results.say("{rate:d}")


@pytest.mark.parametrize("name", ["", "two words", "1st", "a.b", "model", "seed"])
def test_names_are_words(name: str) -> None:
    for put in (make().add, make().add_exact):
        with pytest.raises(NanoinferError, match="use one word that is not a setting"):
            put(name, 1.0)


@pytest.mark.parametrize("value", [[], None, "fast", float("nan"), [1.0, float("inf")], [1.0, None]])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(NanoinferError, match="result 'rate'"):
        make().add("rate", value)


def test_a_chapter_name_stays_inside_the_results_folder() -> None:
    with pytest.raises(ChapterError, match="chapter name"):
        make(chapter="../escape")


def test_provenance_line_names_machine_versions_date_and_repeats() -> None:
    results = make()
    results.add("rate", [1, 2, 3])
    setting = (
        "Measured with smollm2-135m, cpu, float32, seed 1234; AMD EPYC 7763, 2 cores; torch 2.9.0, python 3.11.7; "
    )
    assert results.provenance_line().markdown == setting + "2026-01-05; 3 samples"
    results.add("other", [1] * 10)
    assert results.provenance_line().markdown.endswith("; 3 to 10 samples")


def test_the_machine_is_what_did_the_work() -> None:
    two = {"cpu": "AMD EPYC 7763", "cores": 2, "gpus": [{"name": "NVIDIA L40S"}, {"name": "NVIDIA L40S"}]}
    assert machine_name(two, "cpu") == "AMD EPYC 7763, 2 cores"
    assert machine_name(two, "cuda:0") == "2 x NVIDIA L40S"
    assert machine_name(PROVENANCE["machine"], "cuda") == "NVIDIA L40S"  # type: ignore[arg-type]


def test_save_and_load_keep_everything(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (book / "notebooks").mkdir()
    monkeypatch.chdir(book / "notebooks")
    results = make()
    results.add("rate", [14.1, 13.8, 14.5], "tok/s", "output tokens / seconds")
    results.add_exact("cache", 46_080, "B")
    results.ledger(change="KV cache", predicted=3.0, measured=[2.0, 2.5, 2.25], unit="x")
    results.save()
    path = book / "_build" / "results" / "05_kv_cache.json"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    record = json.loads(path.read_text())
    assert record["measurement"] is True
    assert record["provenance"] == PROVENANCE | {"other_programs_cores": 0.0}
    assert record["seed"] == 1234 and record["profile"] == "laptop"
    assert record["numbers"]["rate"] == {
        "value": 14.1,
        "unit": "tok/s",
        "definition": "output tokens / seconds",
        "measured": True,
        "samples": [14.1, 13.8, 14.5],
        "low": 13.8,
        "high": 14.5,
    }
    assert record["ledger"] == [
        {"change": "KV cache", "predicted": 3.0, "measured": 2.25, "unit": "x", "samples": [2.0, 2.5, 2.25]}
    ]
    again = Results.load("_build/results/05_kv_cache.json")
    assert (again.numbers, again.ledger_rows, again.provenance) == (
        results.numbers,
        results.ledger_rows,
        record["provenance"],
    )


def test_a_smoke_run_saves_no_measurement(book: Path) -> None:
    results = make(book, profile="smoke")
    results.save()
    assert json.loads(results.path.read_text())["measurement"] is False
    with pytest.raises(NanoinferError, match="smoke run: there is nothing to quote"):
        Results.load(results.path).quote("Fast.")


def test_a_save_that_fails_leaves_the_old_file_and_no_part(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = make(book)
    results.save()
    old = results.path.read_bytes()
    results.add("rate", 1.0)

    def no_space(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", no_space)
    with pytest.raises(OSError, match="No space left"):
        results.save()
    assert results.path.read_bytes() == old
    assert [file.name for file in results.path.parent.iterdir()] == [results.path.name]


def test_outside_a_book_saving_says_where_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ChapterError, match=r"no _toc\.yml in .* or above"):
        make().save()
    assert list(tmp_path.iterdir()) == []


def test_the_book_is_found_from_below(book: Path) -> None:
    (book / "a" / "b").mkdir(parents=True)
    assert book_root(book / "a" / "b") == book_root(book) == book.resolve()


def test_a_quoted_result_is_labelled(book: Path) -> None:
    results = make(book, device="cuda")
    results.add("rate", [14.1, 13.8, 14.5], "tok/s")
    results.save()
    assert Results.load(results.path).quote("It ran at {rate:.1f}.").markdown == (
        f"It ran at 14.1{NB}tok/s. (stored result: smollm2-135m, cuda, float32; NVIDIA L40S; "
        "torch 2.9.0, python 3.11.7; 2026-01-05; 3 samples)"
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"chapter": "a"}'])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(NanoinferError, match=r"bad\.json: not a .*run the chapter again"):
        Results.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NanoinferError, match=r"none\.json: no such results; run the chapter first"):
        Results.load(tmp_path / "none.json")


def test_the_ledger_gathers_all_chapters_in_order(book: Path) -> None:
    later, first, smoke = make(book, chapter="09_batching"), make(book), make(book, "smoke", "10_continuous")
    later.ledger(change="Batching", predicted=None, measured=800.0, unit="tok/s")
    first.ledger(change="KV cache", predicted=9.0, measured=1.0, unit="x")
    first.ledger(change="KV cache", predicted=3.0, measured=[2.0, 2.5, 2.25], unit="x")  # the cell ran again
    smoke.ledger(change="Continuous", predicted=2.0, measured=5.0, unit="x")
    for results in (later, first, smoke):
        results.save()
    machine = "AMD EPYC 7763, 2 cores"
    assert ledger_table(book).text.splitlines()[1:] == [
        "Change | Chapter | Predicted | Measured | Machine",
        f"KV cache | 05_kv_cache | 3.00x | 2.2x (2.0 to 2.5 in 3{NB}samples) | {machine}",
        f"Batching | 09_batching | – | 800{NB}tok/s (one run) | {machine}",
        f"Continuous | 10_continuous | 2.00x | {PLACEHOLDER} | {machine}",
    ]


def test_numbers_need_no_torch_until_the_machine_is_described() -> None:
    assert not hasattr(numbers, "torch") and not hasattr(numbers, "provenance")


def test_a_sentence_keeps_the_numbers_that_it_is_given() -> None:
    results = make()
    said = results.say(
        "{model} does {rate} with {cache}, {verdict}.",
        rate=measured([3.0, 1.0, 2.0], "tok/s", "tokens / seconds"),
        cache=exact(46_080, "B"),
        verdict="which is slow",
    )
    assert said.markdown.replace("\u00a0", " ") == "smollm2-135m does 2.0 tok/s with 46,080 B, which is slow."
    assert results.numbers["rate"] == Number(2.0, "tok/s", "tokens / seconds", True, (3.0, 1.0, 2.0))
    assert results.numbers["cache"] == Number(46_080, "B", measured=False)
    assert "verdict" not in results.numbers


def test_compare_keeps_both_rates_the_gain_and_a_row_of_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("nanoinfer.measure.clock.now", lambda: float(next(clock)))
    results, calls = make(), []
    ways = {
        "slow": lambda: calls.append("slow") or [next(clock) for _ in range(3)],
        "fast": lambda: calls.append("fast"),
    }
    results.compare("gain", ways, work=8, unit="tok/s", change="caching", predicted=3.0, rounds=2)
    assert calls == ["slow", "fast", "fast", "slow", "slow", "fast"]
    assert {name: n.samples for name, n in results.numbers.items()} == {
        "slow": (2.0, 2.0),
        "fast": (8.0, 8.0),
        "gain": (4.0, 4.0),
    }
    assert results.ledger_rows == [
        {"change": "caching", "predicted": 3.0, "measured": 4.0, "unit": "x", "samples": [4.0, 4.0]}
    ]


def test_a_busy_machine_is_named() -> None:
    results = make()
    assert "cores busy" not in results.provenance_line().markdown
    results.provenance = {**PROVENANCE, "other_programs_cores": 0.94}
    assert "Other programs kept 0.9 cores busy meanwhile" in results.provenance_line().markdown
