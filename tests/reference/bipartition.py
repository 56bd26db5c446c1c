"""Algorithm 1 of the CFL paper (Sattler, Müller, Samek 2019), line by line.

Where the paper's pseudo-code needs care:

- Line 3 sorts all m² entries, so every pair comes twice, and the diagonal too. Where entries tie, the paper leaves the
  order open; a stable sort is taken here. For m = 2 that matters: |C| is 2 before the loop begins, and only a first
  entry on the diagonal (i1 = i2, which joins a set with itself) leaves it so. A stable sort puts (0, 0) first, since
  no similarity exceeds the diagonal's.
- Line 7 starts from the empty set, and line 10 adds the *elements* of c: c_tmp is a union of sets, not a set of sets.
- Line 8 runs over C while line 11 removes from it, so it runs over a copy.
- Line 14 puts c_tmp back as one set.
"""

from __future__ import annotations

import numpy as np


def bipartition(alpha: np.ndarray) -> tuple[frozenset[int], frozenset[int]]:
    m = len(alpha)
    s = np.argsort(-alpha.flatten(), kind="stable")  # line 3
    C = {frozenset([i]) for i in range(m)}  # line 4
    for i in range(m * m):  # line 5
        i1, i2 = int(s[i]) // m, int(s[i]) % m  # line 6
        c_tmp: frozenset[int] = frozenset()  # line 7
        for c in list(C):  # line 8
            if i1 in c or i2 in c:  # line 9
                c_tmp = c_tmp | c  # line 10
                C = C - {c}  # line 11
        C = C | {c_tmp}  # line 14
        if len(C) == 2:  # line 15
            c1, c2 = sorted(C, key=min)
            return c1, c2  # line 16
    raise AssertionError(f"Algorithm 1 ends without a bi-partition for m = {m}")


def alpha_cross_max(alpha: np.ndarray, c1: frozenset[int], c2: frozenset[int]) -> float:
    """Return max over i in c1, j in c2 of α_ij (eq. 17, inner maximum)."""
    return max(float(alpha[i, j]) for i in c1 for j in c2)
