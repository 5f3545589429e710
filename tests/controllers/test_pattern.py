import tomllib

import pytest

from fxaudit.controllers.pattern import ACTS, ROLES, library_path, load_pattern, load_patterns
from fxaudit.errors import PatternError

SHIPPED = sorted(library_path().glob("*.toml"))

# Every key once. Errors are pinned to lines of this text, so tests change one line of it and leave the others in place.
WHOLE = """\
schema  = 1
name    = "gate"
summary = "A gate."
cite    = "Nobody 2026"

match = '''
pooled      = pool(input, over=[height, width])
hidden      = chain(linear | activation)(pooled)
coefficient = sigmoid(hidden)
apply       = input * coefficient
'''

where   = ["channel > 1", "depends(coefficient, input)"]
exclude = ["coefficient = softmax(_)"]

[shape]
input       = "batch channel height width"
pooled      = "batch channel 1 1"
coefficient = "batch channel 1 1"
hidden      = "batch channel 1 1"

[intervene]
axes    = { batch = "sample", channel = "unit" }
acts    = "multiply"
neutral = 1.0
range   = [0.0, 1.0]
sums_to = { axis = "channel", value = 1.0 }
coupled = ["hidden"]
taps    = { scores = "pooled" }

[[example]]
why    = "nothing"
expect = 0
inputs = ["2 3 4 4", "int 2 6"]
code   = "model = nn.Identity()"

[[example]]
why    = "nothing, again"
expect = 0
inputs = ["2 3 4 4"]
code   = "model = nn.ReLU()"
"""


@pytest.fixture
def read(tmp_path):
    def load(text):
        path = tmp_path / "gate.toml"
        path.write_text(text, encoding="utf-8")
        return load_pattern(path)

    return load


@pytest.fixture
def whole(read):
    return read(WHOLE)


def line_of(text, part):
    return text[: text.index(part)].count("\n") + 1


def changed(old, new):
    assert WHOLE.count(old) == 1, old
    return WHOLE.replace(old, new)


def refused(read, text):
    with pytest.raises(PatternError) as raised:
        read(text)
    return raised.value


# --- a whole file ---------------------------------------------------------------------------------------------------


def test_the_text_keys_are_kept(whole):
    assert (whole.name, whole.summary, whole.cite) == ("gate", "A gate.", "Nobody 2026")


def test_the_equations_are_kept_in_order(whole):
    assert list(whole.equations) == ["pooled", "hidden", "coefficient", "apply"]


def test_the_shapes_are_parsed(whole):
    assert {name: shape.text for name, shape in whole.shapes.items()} == tomllib.loads(WHOLE)["shape"]


def test_the_predicates_are_kept(whole):
    assert [predicate.text for predicate in whole.where] == ["channel > 1", "depends(coefficient, input)"]


def test_the_exclusions_are_kept(whole):
    assert [(text, name) for text, name, _ in whole.exclude] == [("coefficient = softmax(_)", "coefficient")]


def test_the_axis_roles_are_kept(whole):
    assert whole.intervene.axes == {"batch": "sample", "channel": "unit"}


def test_the_sample_axis_is_the_one_with_that_role(whole):
    assert whole.sample_axis == "batch"


def test_the_range_is_kept_as_two_bounds(whole):
    assert (whole.intervene.low, whole.intervene.high) == (0.0, 1.0)


def test_the_constraint_is_kept(whole):
    assert (whole.intervene.simplex_axis, whole.intervene.simplex_sum) == ("channel", 1.0)


def test_the_neutral_value_is_kept(whole):
    assert whole.intervene.neutral == 1.0


def test_the_coefficient_and_what_is_coupled_are_bound(whole):
    assert whole.bound == ("coefficient", "hidden")


def test_the_taps_are_kept(whole):
    assert whole.intervene.taps == {"scores": "pooled"}


def test_the_examples_are_kept_in_order(whole):
    assert [(e.why, e.expect, e.inputs, e.code) for e in whole.examples] == [
        ("nothing", 0, ("2 3 4 4", "int 2 6"), "model = nn.Identity()"),
        ("nothing, again", 0, ("2 3 4 4",), "model = nn.ReLU()"),
    ]


def test_a_range_may_be_infinite(read):
    assert read(changed("[0.0, 1.0]", "[-inf, inf]")).intervene.low == float("-inf")


def test_a_line_of_the_match_block_is_found_in_the_file(whole):
    line = line_of(WHOLE, "coefficient = sigmoid")
    assert whole.where_in_file(whole.equations["coefficient"].line) == f"{whole.path}:{line}"


def test_a_match_block_that_starts_on_the_line_of_its_key_is_found_in_the_file(read):
    text = changed("match = '''\npooled", "match = '''pooled")
    found = read(text)
    line = line_of(text, "coefficient = sigmoid")
    assert found.where_in_file(found.equations["coefficient"].line) == f"{found.path}:{line}"


def test_the_digest_is_that_of_the_meaning_not_of_the_spelling(read):
    spaced = changed('cite    = "Nobody 2026"\n', '# a remark\ncite = "Nobody 2026"\n')
    assert read(WHOLE).digest == read(spaced).digest


def test_the_digest_leaves_examples_out(read):
    assert read(WHOLE).digest == read(changed('"nothing, again"', '"nothing at all"')).digest


def test_the_digest_changes_with_the_match_block(read):
    assert read(WHOLE).digest != read(changed("sigmoid(hidden)", "tanh(hidden)")).digest


@pytest.mark.parametrize("key", ["cite", "where", "exclude"])
def test_a_key_that_is_not_required_may_be_left_out(read, key):
    line = next(line for line in WHOLE.splitlines() if line.startswith(key))
    assert read(changed(line, "")).name == "gate"


@pytest.mark.parametrize("key", ["neutral", "range", "sums_to", "coupled", "taps"])
def test_an_intervention_key_that_is_not_required_may_be_left_out(read, key):
    line = next(line for line in WHOLE.splitlines() if line.startswith(key))
    assert read(changed(line, "")).name == "gate"


def test_a_coupled_capture_may_be_optional(read):
    assert read(changed('coupled = ["hidden"]', 'coupled = ["hidden"]\noptional = ["hidden"]')).intervene.optional == (
        "hidden",
    )


def test_only_what_is_coupled_can_be_optional(read):
    error = refused(read, changed('coupled = ["hidden"]', 'coupled = ["hidden"]\noptional = ["hiden"]'))
    assert error.what == "`hiden` is optional but not coupled; did you mean `hidden`?"


@pytest.mark.parametrize("acts", ACTS)
def test_every_documented_way_to_act_is_accepted(read, acts):
    assert read(changed('"multiply"', f'"{acts}"')).intervene.acts == acts


@pytest.mark.parametrize(
    ("apply", "acts", "neutral"), [("mul", "multiply", 1.0), ("add", "add", 0.0), ("sub", "add", 0.0)]
)
def test_where_the_apply_site_decides_a_product_is_neutral_at_one_and_a_sum_at_zero(read, apply, acts, neutral):
    line = next(line for line in WHOLE.splitlines() if line.startswith("neutral"))
    family = read(changed(line, 'neutral = "by-apply"')).intervene
    assert family.neutral is None
    assert (family.at(apply).acts, family.at(apply).neutral_of("coefficient")) == (acts, neutral)
    assert read(WHOLE).intervene.at(apply) == read(WHOLE).intervene


def test_a_neutral_value_is_a_number_or_the_apply_sites(read):
    line = next(line for line in WHOLE.splitlines() if line.startswith("neutral"))
    error = refused(read, changed(line, 'neutral = "by-site"'))
    assert error.expected == 'a number, or "by-apply"'


def test_the_roles_are_the_closed_set_of_the_design():
    assert set(ROLES) == {"sample", "position", "unit", "slot"}


# --- mistakes -------------------------------------------------------------------------------------------------------

# What is replaced, by what, and what the error says. The line it names is that of the replacement.
MISTAKES = {
    "unknown key": ('cite    = "', 'cites   = "', "unknown key `cites`; did you mean `cite`?"),
    "unknown table": ('[[example]]\nwhy    = "nothing, again"', '[[exampel]]\nwhy = ""', "unknown key `exampel`"),
    "unknown schema": ("schema  = 1", "schema  = 2", "schema 2 is not known"),
    "another name": ('name    = "gate"', 'name    = "gates"', "the name of a pattern is the name of its file"),
    "summary of another type": ('summary = "A gate."', "summary = 3", "`summary` has the wrong type"),
    "cite of another type": ('cite    = "Nobody 2026"', "cite    = 2026", "`cite` has the wrong type"),
    "unknown op": ("hidden      = chain(linear", "hidden      = chain(linaer", "unknown op or op class `linaer`"),
    "syntax": ("coefficient = sigmoid(hidden)", "coefficient = sigmoid(hidden", "this is not an expression"),
    "over an unknown axis": ("over=[height, width]", "over=[hieght, width]", "`over` names `hieght`, no axis of"),
    "where of another type": (
        'where   = ["channel > 1", "depends(coefficient, input)"]',
        'where   = "channel > 1"',
        "`where` has the wrong type",
    ),
    "unknown predicate": ('where   = ["channel > 1"', 'where   = ["sizes(channel) > 1"', "no predicate `sizes`"),
    "unknown axis in where": ('where   = ["channel > 1"', 'where   = ["chanel > 1"', "`chanel` is no axis of [shape]"),
    "exclude without equation": (
        'exclude = ["coefficient = softmax(_)"]',
        'exclude = ["softmax(_)"]',
        "not an equation",
    ),
    "exclude of an unknown name": (
        'exclude = ["coefficient = softmax(_)"]',
        'exclude = ["coeficient = softmax(_)"]',
        "`match` does not define; did you mean `coefficient`?",
    ),
    "shape with commas": (
        'pooled      = "batch channel 1 1"',
        'pooled      = "batch, channel 1 1"',
        "cannot read the axis `batch,`",
    ),
    "shape of an unknown capture": (
        'pooled      = "batch channel 1 1"',
        'pooler      = "batch channel 1 1"',
        "[shape] speaks of `pooler`",
    ),
    "shape of another type": ('pooled      = "batch channel 1 1"', "pooled      = 4", "`pooled` has the wrong type"),
    "recorded with a rest": (
        'coefficient = "batch channel 1 1"',
        'coefficient = "batch channel ..."',
        "each of its axes needs a name",
    ),
    "recorded with a wildcard": (
        'coefficient = "batch channel 1 1"',
        'coefficient = "batch channel _ _"',
        "each of its axes needs a name",
    ),
    "recorded without sample": (
        'coefficient = "batch channel 1 1"',
        'coefficient = "channel 1 1"',
        "`coefficient` has no sample axis",
    ),
    "unknown intervention key": ("neutral = 1.0", "netural = 1.0", "unknown key `netural`; did you mean `neutral`?"),
    "unknown role": (
        'axes    = { batch = "sample", channel = "unit" }',
        'axes    = { batch = "sample", channel = "units" }',
        "axis `channel` has no such role; did you mean `unit`?",
    ),
    "no sample role": (
        'axes    = { batch = "sample", channel = "unit" }',
        'axes    = { batch = "position", channel = "unit" }',
        "one axis must have the role `sample`",
    ),
    "two sample roles": (
        'axes    = { batch = "sample", channel = "unit" }',
        'axes    = { batch = "sample", channel = "sample" }',
        "one axis must have the role `sample`",
    ),
    "axis without role": (
        'axes    = { batch = "sample", channel = "unit" }',
        'axes    = { batch = "sample" }',
        "axis `channel` of `coefficient` has no role",
    ),
    "axes of another type": (
        'axes    = { batch = "sample", channel = "unit" }',
        'axes    = ["batch"]',
        "`axes` has the wrong type",
    ),
    "unknown act": ('acts    = "multiply"', 'acts    = "multiplies"', "`acts` is unknown; did you mean `multiply`?"),
    "neutral of another type": ("neutral = 1.0", 'neutral = "one-hot"', "`neutral`"),
    "range of one": ("range   = [0.0, 1.0]", "range   = [0.0]", "`range` cannot be read"),
    "range of text": ("range   = [0.0, 1.0]", 'range   = ["a", "b"]', "`range` cannot be read"),
    "sums_to without axis": (
        'sums_to = { axis = "channel", value = 1.0 }',
        "sums_to = { value = 1.0 }",
        "`sums_to` cannot be read",
    ),
    "sums_to an unknown axis": (
        'sums_to = { axis = "channel", value = 1.0 }',
        'sums_to = { axis = "chanel", value = 1.0 }',
        "`sums_to` cannot be read",
    ),
    "sums_to of another type": (
        'sums_to = { axis = "channel", value = 1.0 }',
        'sums_to = { axis = "channel", value = "one" }',
        "`sums_to`",
    ),
    "coupled of another type": ('coupled = ["hidden"]', 'coupled = "hidden"', "`coupled`"),
    "coupled as a number": ('coupled = ["hidden"]', "coupled = 1", "`coupled`"),
    "taps of another type": ('taps    = { scores = "pooled" }', 'taps    = ["pooled"]', "`taps`"),
    "unknown tap": (
        'taps    = { scores = "pooled" }',
        'taps    = { score = "pooled" }',
        "unknown tap `score`; did you mean `scores`?",
    ),
    "example without number": ('why    = "nothing, again"\nexpect = 0', 'why    = "nothing, again"', "`expect`"),
    "unknown example key": ('why    = "nothing, again"', 'whi    = "nothing, again"', "unknown key `whi`"),
    "inputs of another form": ('inputs = ["2 3 4 4"]', 'inputs = ["2x3x4x4"]', "`inputs` cannot be read"),
    "expect of another type": (
        '"nothing, again"\nexpect = 0',
        '"nothing, again"\nexpect = "0"',
        "`expect` has the wrong",
    ),
    "expect as a boolean": (
        '"nothing, again"\nexpect = 0',
        '"nothing, again"\nexpect = true',
        "`expect` has the wrong",
    ),
    "inputs as text": ('inputs = ["2 3 4 4"]', 'inputs = "2 3 4 4"', "`inputs` has the wrong type"),
}
# Where the mistake is that something is absent, the line is that of the table or key that lacks it.
ABSENT = {"example without number"}


@pytest.mark.parametrize(("old", "new", "message"), MISTAKES.values(), ids=MISTAKES)
def test_each_mistake_is_a_pattern_error_that_says_which(read, old, new, message):
    assert message in refused(read, changed(old, new)).what


@pytest.mark.parametrize(
    ("old", "new"),
    [(old, new) for name, (old, new, _) in MISTAKES.items() if name not in ABSENT],
    ids=[name for name in MISTAKES if name not in ABSENT],
)
def test_each_mistake_is_found_on_its_line(read, tmp_path, old, new):
    text = changed(old, new)
    # Of a replacement that spans lines, the last one is the wrong one, except where the first is a table's name.
    start = text.index(new)
    line = text.count("\n", 0, start if new.startswith("[[") else start + len(new)) + 1
    assert refused(read, text).where == f"{tmp_path / 'gate.toml'}:{line}"


@pytest.mark.parametrize("key", ["schema", "name", "summary", "match"])
def test_a_required_key_that_is_missing_is_named(read, key):
    start = WHOLE.index(f"{key} ")
    end = WHOLE.index("'''\n\n", start) + 4 if key == "match" else WHOLE.index("\n", start)
    assert refused(read, WHOLE[:start] + WHOLE[end:]).what == f"`{key}` is missing"


@pytest.mark.parametrize("table", ["shape", "intervene"])
def test_a_required_table_that_is_missing_is_named(read, table):
    start = WHOLE.index(f"[{table}]")
    end = WHOLE.index("\n[", start) + 1
    assert refused(read, WHOLE[:start] + WHOLE[end:]).what == f"`{table}` is missing"


@pytest.mark.parametrize("name", ["coefficient", "apply"])
def test_the_equations_that_every_pattern_needs_are_named(read, name):
    line = next(line for line in WHOLE.splitlines() if line.startswith(name))
    text = WHOLE.replace(line + "\n", "", 1)
    assert f"`match` never defines `{name}`" in refused(read, text).what


def test_a_recorded_capture_needs_a_shape(read):
    error = refused(read, changed('hidden      = "batch channel 1 1"\n', ""))
    assert error.what == "[shape] says nothing of `hidden`, which is recorded"


def test_a_coupled_name_must_be_defined(read):
    error = refused(read, changed('coupled = ["hidden"]', 'coupled = ["hiden"]'))
    assert error.what == "`match` never defines `hiden`; did you mean `hidden`?"


def test_a_mistake_in_a_match_block_on_one_line_has_that_line(read, tmp_path):
    start, end = WHOLE.index("match = "), WHOLE.index("'''\n\n") + 4
    text = WHOLE[:start] + 'match = "coefficient = sigmod(x)"\n' + WHOLE[end:]
    assert refused(read, text).where == f"{tmp_path / 'gate.toml'}:6"


def test_over_an_operand_without_a_shape_is_an_error(read):
    assert "`over` needs an operand with a [shape]" in refused(read, changed("pool(input,", "pool(inputs,")).what


def test_over_may_name_the_rest(read):
    text = changed("over=[height, width]", "over=[...]").replace('"batch channel height width"', '"batch channel ..."')
    assert read(text).name == "gate"


def test_over_may_not_name_a_rest_that_the_shape_does_not_have(read):
    assert "`over` names `...`" in refused(read, changed("over=[height, width]", "over=[...]")).what


def test_broken_toml_is_an_error_with_its_line(read, tmp_path):
    assert refused(read, changed('acts    = "multiply"', "acts    = multiply")).where == f"{tmp_path / 'gate.toml'}:24"


def test_a_key_twice_is_an_error(read):
    assert "is not TOML" in refused(read, changed("neutral = 1.0", "neutral = 1.0\nneutral = 2.0")).what


def test_a_single_example_table_is_an_error_that_says_so(read):
    text = WHOLE[: WHOLE.index("[[example]]")] + '[example]\nwhy = "x"\nexpect = 0\ninputs = ["2"]\ncode = ""\n'
    assert refused(read, text).what == "`example` has the wrong type"


def test_a_file_that_is_not_text_is_an_error(tmp_path):
    path = tmp_path / "gate.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PatternError, match="cannot be read"):
        load_pattern(path)


def test_a_file_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(PatternError, match="cannot be read"):
        load_pattern(tmp_path / "gate.toml")


def test_an_error_carries_the_key_it_is_about(read):
    assert refused(read, changed('"multiply"', '"multiplies"')).key == "acts"


def test_reading_a_pattern_runs_none_of_its_example_code(read, tmp_path):
    target = tmp_path / "made"
    read(changed('"model = nn.ReLU()"', f"'''open({str(target)!r}, \"w\").close()'''"))
    assert not target.exists()


# --- libraries ------------------------------------------------------------------------------------------------------


def test_a_folder_is_read_in_order_of_name(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.toml").write_text(changed('name    = "gate"', f'name = "{name}"'), encoding="utf-8")
    assert [pattern.name for pattern in load_patterns(tmp_path)] == ["a", "b"]


def test_one_name_in_two_folders_is_an_error_naming_both_files(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "gate.toml").write_text(WHOLE, encoding="utf-8")
    with pytest.raises(PatternError) as raised:
        load_patterns(tmp_path / "one", tmp_path / "two")
    assert raised.value.where == f"{tmp_path / 'one' / 'gate.toml'}\n{tmp_path / 'two' / 'gate.toml'}"


def test_a_place_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(PatternError, match="does not exist"):
        load_patterns(tmp_path / "nowhere")


def test_a_folder_without_patterns_is_an_error(tmp_path):
    with pytest.raises(PatternError, match="there is no pattern file"):
        load_patterns(tmp_path)


def test_without_a_place_the_shipped_library_is_read():
    assert [pattern.name for pattern in load_patterns()] == [path.stem for path in SHIPPED]


def test_the_library_is_not_empty():
    assert {"se-gate", "feature-gate", "moe-topk"} <= {path.stem for path in SHIPPED}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_pattern_is_named_like_its_file(path):
    assert load_pattern(path).name == path.stem


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_pattern_says_where_it_was_published(path):
    assert load_pattern(path).cite


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_pattern_has_two_positive_and_two_negative_examples(path):
    expected = [example["expect"] > 0 for example in tomllib.loads(path.read_text(encoding="utf-8"))["example"]]
    assert min(expected.count(True), expected.count(False)) >= 2
