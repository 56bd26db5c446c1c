from __future__ import annotations

from fedclade import LocalTraining
from fedclade.core.queries import Round


def test_the_step_size_of_a_round_decays_from_the_second_on():
    spec = LocalTraining(lr=0.4, lr_decay=0.5)
    assert [Round(number, spec).lr for number in (1, 2, 3)] == [0.4, 0.4 * 0.5, 0.4 * 0.5**2]


def test_what_the_server_draws_belongs_to_seed_purpose_and_round():
    spec = LocalTraining()
    draws = [
        Round(1, spec, 5).generator("cohort").integers(2**62),
        Round(2, spec, 5).generator("cohort").integers(2**62),
        Round(1, spec, 6).generator("cohort").integers(2**62),
        Round(1, spec, 5).generator("other").integers(2**62),
    ]
    assert len(set(draws)) == 4
    assert Round(1, spec, 5).generator("cohort").integers(2**62) == draws[0]
