"""What `import qerl` gives."""

import subprocess
import sys

import qerl


def test_import_is_free_of_torch():
    code = "import sys, qerl.__main__\n"
    code += "assert not {'typer', 'pydantic', 'pandas'} & set(sys.modules)\n"  # ahead of them it can be interrupted
    code += "import qerl.settings.workflow, qerl.cli.commands, qerl.data.sources\n"
    code += "assert callable(qerl.train); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_documented_names_are_listed():
    assert {"load", "train", "sample", "evaluate", "quantize", "export", "publish", "Run"} <= set(dir(qerl))
    assert all(hasattr(qerl, name) for name in dir(qerl))
