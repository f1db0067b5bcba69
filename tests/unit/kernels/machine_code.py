"""Hopper's machine code: asynchronous products (HGMMA) whose registers are written before a wait that covers them."""

import re
import subprocess

from triton import knobs

#: A product with its left operand in four registers, in a group that ends with it if the line names a barrier.
_PRODUCT = re.compile(r"HGMMA\S* R\d+, (?:R(\d+), )?gdesc.*?(gsb0)?$")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\w+)")
_BRANCH = re.compile(r"BRA.*`\((\.L_x_\d+)\)")
_WRITE = re.compile(r"(?:@!?U?P\w+ +)?(?!ST|RED|BAR|BRA|LDGSTS)(\S+) +R(\d+)\b")


def machine_code(cubin, tmp_path):
    """The instructions of a kernel as text."""
    file = tmp_path / "kernel.cubin"
    file.write_bytes(cubin)
    return subprocess.run([knobs.nvidia.nvdisasm.path, "-c", file], capture_output=True, text=True, check=True).stdout


def loops_with_products(code):
    """The loops of `machine_code` that have products with their left operand in registers."""
    return [body for body in _loops(code) if any((match := _PRODUCT.search(line)) and match[1] for line in body)]


def overwritten(code):
    """Instructions of loops that write an operand of an earlier product, of this turn or the last, before its end."""
    return [line for body in loops_with_products(code) for line in _overwritten(body)]


def _loops(code):
    """The instructions of each loop, from its label to the branch back."""
    instructions, labels = [], {}
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            instructions.append(instruction[1])
    for number, line in enumerate(instructions):
        if (branch := _BRANCH.search(line)) and labels.get(branch[1], number + 1) <= number:
            yield instructions[labels[branch[1]] : number + 1]


def _overwritten(body):
    """The same of one loop, of which two turns are read."""
    open_group, pending = set(), []
    for line in body * 2:
        if product := _PRODUCT.search(line):
            open_group |= {int(product[1]) + place for place in range(4)} if product[1] else set()
            if product[2]:
                pending.append(open_group)
                open_group = set()
        elif wait := _WAIT.search(line):
            pending = pending[max(len(pending) - int(wait[1], 16), 0) :]
        elif (write := _WRITE.match(line)) and _registers(*write.groups()) & open_group.union(*pending):
            yield line


def _registers(operation, first):
    count = (
        4
        if ".128" in operation or ".M88.4" in operation or "HMMA" in operation
        else 2
        if re.search(r"\.64|WIDE", operation)
        else 1
    )
    return {int(first) + place for place in range(count)}
