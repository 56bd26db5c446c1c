r"""Tables for papers, in LaTeX with the package booktabs."""

from __future__ import annotations

from collections.abc import Sequence

from fedclade.report.terminal import visible

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "_": r"\_",
    "%": r"\%",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    # At the beginning of a row, these two would be read as an argument of the command before it.
    "[": "{[}",
    "*": "{*}",
    "\n": " ",
    # Characters that fedclade writes, and that pdfLaTeX does not know without further packages.
    "−": "$-$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "–": "--",
    "’": "'",
    "…": r"\ldots{}",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "∞": r"$\infty$",
    "α": r"$\alpha$",
    "γ": r"$\gamma$",
    "δ": r"$\delta$",
    "ε": r"$\varepsilon$",
    "λ": r"$\lambda$",
    "μ": r"$\mu$",
    "µ": r"$\mu$",
    "σ": r"$\sigma$",
    "τ": r"$\tau$",
}

_TRANSLATION = str.maketrans(_SPECIAL)


def escape_latex(text: str) -> str:
    r"""Return a text in which no character is a command of LaTeX.

    Control characters are removed. Letters of other scripts are not changed: they need XeLaTeX or
    LuaLaTeX.

    >>> print(escape_latex("50 % of a_b & c"))
    50 \% of a\_b \& c
    >>> print(escape_latex("78.5 ± 1.2"))
    78.5 $\pm$ 1.2
    """
    return visible(text).translate(_TRANSLATION)


def latex_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    caption: str,
    label: str,
    left: Sequence[str] = (),
    bold: Sequence[tuple[int, str]] = (),
) -> str:
    """Return a table in LaTeX, as the environment ``table`` with rules of booktabs.

    Parameters
    ----------
    columns
        Headings of the columns, as plain text.
    rows
        Cells of each row, as plain text.
    caption
        Caption, as plain text.
    label
        Label for references, such as ``tab:comparison``; it is not escaped.
    left
        Headings of the columns that are aligned at the left; all other columns are aligned at the
        right.
    bold
        Cells to print in bold, each as the number of its row and the heading of its column.
    """
    alignment = "".join("l" if name in left else "r" for name in columns)
    lines = [
        r"% This table needs \usepackage{booktabs}.",
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{escape_latex(caption)}}}",
        rf"  \label{{{label}}}",
        rf"  \begin{{tabular}}{{{alignment}}}",
        r"    \toprule",
        _write_row([escape_latex(name) for name in columns]),
        r"    \midrule",
    ]
    for number, row in enumerate(rows):
        cells: list[str] = []
        for name, text in zip(columns, row, strict=True):
            cell = escape_latex(text)
            cells.append(rf"\textbf{{{cell}}}" if (number, name) in bold else cell)
        lines.append(_write_row(cells))
    lines += [r"    \bottomrule", r"  \end{tabular}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def _write_row(cells: Sequence[str]) -> str:
    r"""Return a row of a table: cells between ampersands, and ``\\`` at the end."""
    return rf"    {' & '.join(cells)} \\"
