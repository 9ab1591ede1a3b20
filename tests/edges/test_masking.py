import json
import time

import pytest

from ssl_sec.edges.masking import masked, masked_code, masked_command, masked_values


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://ada:geheim@host:5432/db", "postgresql://***@host:5432/db"),
        ("see https://token@host/a and s3://k:s@b/c.", "see https://***@host/a and s3://***@b/c."),
        ("'postgresql+psycopg2://ada:Zx/9+q=@host/db'", "'postgresql+psycopg2://***@host/db'"),
        ("s3://bucket/a@b/c", "s3://bucket/a@b/c"),
        ("http://ada:p@ss@wo@host/a@b", "http://***@host/a@b"),
        ("postgresql://ada:Z/x@9@host/db", "postgresql://***@host/db"),
        ("abfs://runs@acct.dfs.core.windows.net/a", "abfs://runs@acct.dfs.core.windows.net/a"),
        ("x=wasbs://runs@acct.blob.core.windows.net/a@b", "x=wasbs://runs@acct.blob.core.windows.net/a@b"),
        ("abfss://acct:key@host/runs", "abfss://***@host/runs"),
        ("https://a.b/t.parquet?sv=1&sig=Se%2Bcret&se=2", "https://a.b/t.parquet?sv=1&sig=***&se=2"),
        ("http://a/b?X-Amz-Signature=f0a&X-Amz-Date=2", "http://a/b?X-Amz-Signature=***&X-Amz-Date=2"),
        (
            "http://a/b?Policy=eyJ_&Signature=Q~&Key-Pair-Id=K1&versionId=3",
            "http://a/b?Policy=***&Signature=***&Key-Pair-Id=***&versionId=3",
        ),
        (
            "http://a/b?api_key=1&auth=2&X-Amz-Security-Token=3",
            "http://a/b?api_key=***&auth=***&X-Amz-Security-Token=***",
        ),
        ("http://127.0.0.1:5000/#/experiments/1", "http://127.0.0.1:5000/#/experiments/1"),
        ("sqlite:////runs/mlflow.db", "sqlite:////runs/mlflow.db"),
        ("mail ada@host about http://host/x", "mail ada@host about http://host/x"),
    ],
)
def test_userinfo_of_addresses_is_hidden(text, shown):
    assert masked(text) == shown
    assert masked(shown) == shown


@pytest.mark.parametrize("password", ["ge heim", "ge'heim", 'ge"heim', "a' b\"c@d", "a/b c"])
def test_a_password_may_have_spaces_and_quotes(password):
    uri, shown = f"postgresql://ada:{password}@host/db", "postgresql://***@host/db"
    assert masked(uri) == shown and masked_values({"uri": uri, "all": [uri]}) == {"uri": shown, "all": [shown]}
    for quoted in (repr(uri), json.dumps(uri)):
        assert masked(f"tracking.uri: found {quoted}, not 'a@b'")[1:-1].endswith(f"{shown}{quoted[0]}, not 'a@b")
    assert masked_command([f"tracking.uri={uri}"]) == f"'tracking.uri={shown}'"
    assert masked(f"run --now 'tracking.uri={uri.replace(chr(39), '')}' x@y") == f"run --now 'tracking.uri={shown}' x@y"


@pytest.mark.parametrize("kind", ["postgres", "mysql+pymysql", "mariadb", "mssql+pyodbc", "oracle"])
def test_a_password_of_a_database_may_have_a_slash(kind):
    assert masked(f"{kind}://ada:Zx/9@host/db") == f"{kind}://***@host/db"


def test_values_of_secret_keys_are_hidden_everywhere():
    values = {
        "tracking": {"uri": "http://u:p@h", "api_token": "abc", "password": None},
        "data": {"train": ["s3://k:s@b/a", 3], "AWS_SECRET_ACCESS_KEY": "x", "apiKey": 5},
        "keys": 2,
        "locations": ("s3://k:s@b/c", {"token": "x"}),
    }
    assert masked_values(values) == {
        "tracking": {"uri": "http://***@h", "api_token": "***", "password": None},
        "data": {"train": ["s3://***@b/a", 3], "AWS_SECRET_ACCESS_KEY": "***", "apiKey": "***"},
        "keys": 2,
        "locations": ["s3://***@b/c", {"token": "***"}],
    }
    assert values["tracking"]["uri"] == "http://u:p@h"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("+api_key = 'abc def'", "+api_key = '***'"),
        ('+    "password": "x",', '+    "password": "***",'),
        ("+export AWS_SECRET_ACCESS_KEY=abcDEF123/x", "+export AWS_SECRET_ACCESS_KEY=***"),
        ("+token: ghp_0123456789", "+token: ***"),
        ("+uri = 'http://ada:x@host'", "+uri = 'http://***@host'"),
        ("+tokenizer = GPT2Tokenizer.from_pretrained(name)", "+tokenizer = GPT2Tokenizer.from_pretrained(name)"),
        ("+    token: str = field()", "+    token: str = field()"),
        ("+margin = 0.25", "+margin = 0.25"),
    ],
)
def test_code_is_shown_without_values_assigned_to_secrets(text, shown):
    assert masked_code(text) == shown


def test_a_long_line_without_spaces_is_shown_at_once():
    picture = f'+"image/png": "{"iVBORw0KGgo" * 2_000}"'  # as in a notebook
    begun = time.process_time()
    assert masked_code(picture) == picture
    assert time.process_time() - begun < 5


def test_a_command_line_is_shown_without_secrets():
    words = ["python", "-m", "jobs.pretrain", "a.token=x y", "uri=s3://a:b@c", "seeds=[0, 1]"]
    assert masked_command(words) == "python -m jobs.pretrain 'a.token=***' 'uri=s3://***@c' 'seeds=[0, 1]'"
