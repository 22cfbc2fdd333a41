"""Figures of the papers' tables that benchmarks.papers.equations recomputes, as printed."""

from __future__ import annotations

from typing import NamedTuple


class Speedups(NamedTuple):
    """C2T v2 4.3: what its equations 9 and 11 are said to give, and its "best experimental results"."""

    theoretical: float
    actual: float
    best_measured: float


SPEEDUPS = {"7B/8B": Speedups(1.69, 1.10, 1.07), "70B": Speedups(1.48, 1.21, 1.17)}


class Comparison(NamedTuple):
    """A pair of rows of C2T v2 table 2: MT-bench, HumanEval, GSM8K, Alpaca, CNN/DM, QA.

    gamma: candidate tokens in thousands. speeds: tokens per second. gain: the printed change of the mean speed.
    """

    name: str
    gamma: tuple[int, ...]
    gamma_c2t: tuple[int, ...]
    speeds: tuple[int, ...]
    speeds_c2t: tuple[int, ...]
    gain: float


class Tree(NamedTuple):
    """A row of C2T v1's table 4: N, candidate tokens, accept length without the bonus token."""

    method: str
    nodes: int
    gamma: int
    tau: float


TABLE_4 = (Tree("E-1", 26, 340054, 2.66), Tree("E-2", 26, 317668, 2.95), Tree("E-2", 60, 628980, 3.65))

# the names are the paper's: L31 Llama-3.1, DSL R1-Distill-Llama, L33 Llama-3.3; SD, E2, E3 without and with C2T
V2_TABLE_2 = (
    Comparison(
        "L31 8B SD",
        (88, 39, 24, 27, 37, 25),
        (90, 41, 26, 27, 38, 27),
        (39, 50, 38, 39, 28, 28),
        (44, 58, 42, 43, 29, 30),
        0.11,
    ),
    Comparison(
        "L31 8B E2",
        (788, 357, 218, 251, 376, 226),
        (711, 315, 201, 230, 323, 185),
        (59, 76, 70, 78, 55, 60),
        (65, 81, 74, 82, 61, 66),
        0.08,
    ),
    Comparison(
        "L31 8B E3",
        (522, 247, 148, 154, 228, 154),
        (461, 189, 143, 155, 192, 130),
        (81, 109, 104, 98, 87, 88),
        (86, 120, 110, 107, 94, 93),
        0.07,
    ),
    Comparison(
        "DSL 8B SD",
        (146, 67, 49, 73, 78, 75),
        (148, 69, 54, 69, 72, 69),
        (31, 40, 42, 31, 25, 24),
        (34, 45, 48, 35, 27, 26),
        0.12,
    ),
    Comparison(
        "DSL 8B E2",
        (788, 467, 431, 669, 590, 558),
        (720, 401, 388, 609, 541, 520),
        (61, 80, 81, 66, 60, 66),
        (68, 87, 87, 71, 64, 71),
        0.07,
    ),
    Comparison(
        "DSL 8B E3",
        (838, 377, 289, 411, 462, 439),
        (805, 359, 276, 391, 459, 404),
        (95, 110, 118, 94, 82, 85),
        (101, 121, 130, 98, 87, 89),
        0.07,
    ),
    Comparison(
        "L33 70B SD",
        (96, 43, 22, 29, 38, 32),
        (92, 44, 20, 31, 35, 25),
        (12, 18, 14, 12, 12, 7),
        (14, 23, 18, 15, 15, 10),
        0.33,
    ),
    Comparison(
        "L33 70B E2",
        (275, 335, 200, 275, 290, 275),
        (262, 321, 185, 262, 288, 271),
        (22, 30, 24, 22, 22, 19),
        (25, 34, 31, 25, 27, 22),
        0.17,
    ),
    Comparison(
        "L33 70B E3",
        (138, 222, 113, 138, 203, 160),
        (114, 190, 84, 114, 217, 148),
        (43, 45, 42, 43, 30, 33),
        (47, 52, 52, 47, 33, 37),
        0.15,
    ),
)

# entropy interval -> (accuracy, precision, recall) of EAGLE-2's top 60 and of C2T
V2_TABLE_5 = {
    "[0, 1)": ((0.9127, 0.1367, 0.949), (0.9466, 0.2067, 0.9492)),
    "[1, 2)": ((0.8657, 0.0386, 0.8435), (0.9382, 0.081, 0.8438)),
    "[2, 3)": ((0.8604, 0.0277, 0.8288), (0.9456, 0.0689, 0.8292)),
    "[3, 4)": ((0.8742, 0.0219, 0.8172), (0.9552, 0.0598, 0.8172)),
    "[4, 5)": ((0.8916, 0.021, 0.8209), (0.9636, 0.0604, 0.8209)),
    "[5, 6)": ((0.9097, 0.0203, 0.7937), (0.9713, 0.0619, 0.7937)),
    "[6, inf)": ((0.9329, 0.0233, 1.0), (0.9802, 0.0764, 0.7845)),
    "Total": ((0.89, 0.0693, 0.9137), (0.9478, 0.1367, 0.914)),
}


class Run(NamedTuple):
    """A row of DySpec's tables 1-4: seconds per token of DySpec and of plain decoding, tokens per verify step."""

    dataset: str
    temperature: float
    latency: float
    accepted: float
    sequoia: float
    baseline: float


# table -> rows; 64 nodes in tables 1-3, 768 in table 4
DYSPEC = {
    1: (
        Run("C4", 0.0, 0.0073, 5.25, 4.99, 0.02303),
        Run("C4", 0.6, 0.00994, 3.71, 3.45, 0.02191),
        Run("OWT", 0.0, 0.0096, 3.79, 3.81, 0.02191),
        Run("OWT", 0.6, 0.01096, 3.07, 3.04, 0.02634),
        Run("CNN", 0.0, 0.00926, 3.97, 4.04, 0.02246),
        Run("CNN", 0.6, 0.01071, 3.18, 3.22, 0.02242),
    ),
    2: (
        Run("C4", 0.0, 0.00969, 4.98, 4.35, 0.03033),
        Run("C4", 0.6, 0.01245, 3.62, 3.15, 0.02824),
        Run("OWT", 0.0, 0.0127, 3.59, 3.44, 0.03117),
        Run("OWT", 0.6, 0.01443, 3.02, 2.8, 0.02827),
        Run("CNN", 0.0, 0.0119, 3.82, 3.67, 0.03054),
        Run("CNN", 0.6, 0.01385, 3.11, 2.91, 0.02812),
    ),
    3: (
        Run("C4", 0.0, 0.53696, 9.1, 6.08, 5.5965),
        Run("C4", 0.6, 0.78912, 6.21, 5.72, 5.34781),
        Run("OWT", 0.0, 0.78106, 7.23, 6.41, 5.52462),
        Run("OWT", 0.6, 0.87547, 6.77, 6.07, 5.3034),
        Run("CNN", 0.0, 0.81716, 6.93, 6.42, 5.31049),
        Run("CNN", 0.6, 0.89055, 6.95, 6.07, 5.2928),
    ),
    4: (
        Run("C4", 0.0, 0.42412, 16.04, 9.4, 5.5965),
        Run("C4", 0.6, 0.88494, 7.14, 8.96, 5.34781),
        Run("OWT", 0.0, 0.54885, 11.79, 9.81, 5.52462),
        Run("OWT", 0.6, 0.81002, 7.66, 9.12, 5.3034),
        Run("CNN", 0.0, 0.54739, 11.46, 9.54, 5.31049),
        Run("CNN", 0.6, 0.87648, 7.02, 8.8, 5.2928),
    ),
}
