"""A calculator that needs no sandbox: it reads numbers and four operations, and nothing else."""

from __future__ import annotations

import ast
import operator
from fractions import Fraction

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
MAX_LENGTH = 200
"""Characters of an expression; numbers stay small enough to be written."""


async def calculate(expression: str) -> str:
    """Evaluates an expression of numbers, + - * / and parentheses."""
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"at most {MAX_LENGTH} characters")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return str(value) if value.denominator == 1 else f"{float(value):g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return Fraction(OPERATIONS[type(op)](_value(left), _value(right)))
    raise ValueError("only numbers, + - * / and parentheses")
