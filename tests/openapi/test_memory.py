"""The peak memory of an import is at most 40 times its document plus 50 MB, or the document is rejected."""

import sys
from pathlib import Path

import pytest
from tests.openapi.memory import peaks, ratio
from tests.openapi.test_corpus import INDEX, SHARED, needs_documents

pytestmark = [
    pytest.mark.requirement("R68"),
    pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc"),
]

YAML = 'openapi: 3.1.0\ninfo: {title: a, version: "1"}\n'
ONE = "paths: {/a: {get: {responses: {}}}}\n"
JSON = '{"openapi":"3.1.0","info":{"title":"a","version":"1"},'
ENTRY = '"{}":0'.format
TWO = ("200", "201")

ATTACKS = {
    "a-long-text.yaml": f'{YAML}{ONE}x: &a "{"y" * 20_000}"\nz: [{"*a, " * 5_000}]\n',
    "one-wide-character.yaml": f'{YAML}{ONE}x: &a "{"y" * 20_000}🐢"\nz: [{"*a, " * 2_000}]\n',
    "a-list-of-texts.yaml": f"{YAML}{ONE}x: &a [{'yyyyyyyy, ' * 1_000}]\nz: [{'*a, ' * 900}]\n",
    "descriptions.yaml": f'{YAML}x-d: &a "{"y" * 20_000}"\npaths:\n'
    + "".join(f"  /a{n}: {{get: {{description: *a, responses: {{}}}}}}\n" for n in range(5_000)),
    "an-enum.yaml": f"{YAML}{ONE}x: &a {{enum: [{', '.join(map(str, range(2_000)))}]}}\n"
    f"y: [{'*a, ' * 450}]\n",
    "numbers.yaml": f"{YAML}{ONE}x: [{'0,' * 1_500_000}0]\n",
    "numbers-in-lines.yaml": f"{YAML}{ONE}x:\n" + "- 1\n" * 900_000,
    "mappings.yaml": f"{YAML}{ONE}x: [{'{a: 1},' * 600_000}0]\n",
    "objects.json": f'{JSON}"paths":{{"/a":{{"get":{{}}}}}},"x":[' + '{"":0},' * 900_000 + "0]}",
    "deep-objects.json": f'{JSON}"paths":{{"/a":{{"get":{{"$ref":"b.json"}}}}}},"x":['
    + ('{"":' * 400 + "0" + "}" * 400 + ",") * 4_000
    + "0]}",
    "operations.json": f'{JSON}"paths":{{'
    + ",".join(f'"/{n}":{{"get":{{}},"put":{{}},"post":{{}}}}' for n in range(60_000))
    + "}}",
    "referenced-operations.json": f'{JSON}"c":{{"get":{{}},"put":{{}},"post":{{}}}},"paths":{{'
    + ",".join(f'"/{n}":{{"$ref":"#/c"}}' for n in range(60_000))
    + "}}",
    "a-large-path-item.json": f'{JSON}"c":{{"get":{{}},'
    + ",".join(f'"x-{n}":0' for n in range(20_000))
    + '},"paths":{'
    + ",".join(f'"/{n}":{{"$ref":"#/c","x":0}}' for n in range(2_000))
    + "}}",
    "errors.json": f'{JSON}"paths":{{"/a":{{"get":{{"responses":{{'
    + ",".join(f'"{n:x}":{{}}' for n in range(300_000))
    + "}}}}}",
    "many-methods.json": f'{JSON}"paths":{{"/{"a" * 400_000}":{{"additionalOperations":{{'
    + ",".join(f'"m{n}":{{}}' for n in range(2_000))
    + "}}}}",
    "summaries.json": f'{JSON}"c":{{"get":{{"tags":[{",".join(["0"] * 9_000)},"b"]}}}},"paths":{{'
    + ",".join(f'"/{n}":{{"$ref":"#/c"}}' for n in range(20_000))
    + "}}",
    "shared-tags.json": f'{JSON}"c":{{"get":{{"tags":[{",".join(["0"] * 9_000)},'
    + ",".join(f'"{n}"' for n in range(9_000))
    + ']}},"paths":{'
    + ",".join(f'"/{n}":{{"$ref":"#/c"}}' for n in range(9_000))
    + "}}",
    "shared-errors.json": f'{JSON}"c":{{"get":{{"responses":{{'
    + ",".join(f'"{n}":{{"$ref":"#/e"}}' for n in range(5_000))
    + '}}},"e":{"description":"x"},"paths":{'
    + ",".join(f'"/{n}":{{"$ref":"#/c"}}' for n in range(9_000))
    + "}}",
    "a-shared-name.json": f'{JSON}"c":{{"get":{{"operationId":"{"a" * 200_000}"}}}},"paths":{{'
    + ",".join(f'"/{n}":{{"$ref":"#/c"}}' for n in range(9_000))
    + "}}",
    "shared-links.json": f'{JSON}"c":{{"get":{{"responses":{{"200":{{"links":{{'
    + ",".join(f'"{n}":0' for n in range(5_000))
    + '}}}}},"paths":{'
    + ",".join(f'"/{n}":{{"$ref":"#/c"}}' for n in range(5_000))
    + "}}",
    "links-of-two-responses.json": f'{JSON}"c":{{"get":{{"responses":{{'
    + ",".join(f'"{s}":{{"links":{{"{s}":0,{",".join(map(ENTRY, range(3_000)))}}}}}' for s in TWO)
    + '}}},"paths":{'
    + ",".join(f'"/{n}":{{"$ref":"#/c"}}' for n in range(3_000))
    + "}}",
    "ignored-responses.json": f'{JSON}"c":{{"get":{{"responses":{{'
    + ",".join(f'"{n:x}":0' for n in range(3_000))
    + '}}},"paths":{'
    + ",".join(f'"/{n}":{{"$ref":"#/c"}}' for n in range(3_000))
    + "}}",
    "misspelt-types.json": f'{JSON}"c":{{"post":{{"requestBody":{{"content":{{'
    + ",".join(f'"multipart/form;a={n}":{{}}' for n in range(2_000))
    + '}}}},"paths":{'
    + ",".join(f'"/{n}":{{"$ref":"#/c"}}' for n in range(2_000))
    + "}}",
    "skipped.json": f'{JSON}"paths":{{'
    + ",".join(f'"/{n}":{{"get":0,"put":0,"post":0}}' for n in range(100_000))
    + "}}",
}


@pytest.mark.slow
def test_a_small_document_that_expands_is_rejected_or_stays_small(tmp_path: Path) -> None:
    for name, text in ATTACKS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")

    found = peaks(sorted(tmp_path.iterdir()))

    assert found.keys() == ATTACKS.keys()
    assert {name: row for name, row in found.items() if ratio(row) > 40} == {}


@pytest.mark.slow
def test_many_small_files_share_the_memory_of_their_document(tmp_path: Path) -> None:
    files = [f"api-{n}.yaml" for n in range(60)]
    paths = ", ".join(f"/{n}: {{$ref: {name}}}" for n, name in enumerate(files))
    (tmp_path / "api.yaml").write_text(f"{YAML}paths: {{{paths}}}\n", encoding="utf-8")
    for name in files:
        (tmp_path / name).write_text(f"get: {{}}\nx: [{'0,' * 100_000}0]\n", encoding="utf-8")

    [row] = peaks([tmp_path / "api.yaml"]).values()

    assert ratio(row) <= 40


@needs_documents
@pytest.mark.slow
def test_real_documents_take_at_most_20_times_their_size() -> None:
    largest = sorted(INDEX, key=lambda name: -(SHARED / "openapi" / name).stat().st_size)
    sample = {*largest[:8], *[name for name in largest if name.endswith(".yaml")][:8]}

    found = peaks(SHARED / "openapi" / name for name in sorted(sample))

    assert {name: row for name, row in found.items() if "error" in row or ratio(row) > 20} == {}


@pytest.mark.slow
def test_aliases_that_share_long_texts_are_read(tmp_path: Path) -> None:
    description = "A text that many operations share. " * 50
    text = f'{YAML}x-d: &a "{description}"\npaths:\n' + "".join(
        f"  /a{n}: {{get: {{description: *a, responses: {{}}}}}}\n" for n in range(2_000)
    )
    path = tmp_path / "api.yaml"
    path.write_text(text, encoding="utf-8")

    [row] = peaks([path]).values()

    assert row["operations"] == 2_000
