//! A contract: limits that a run must keep, from a file of the user. Here is the judgement; who reads files parses it.

use serde::{Deserialize, Serialize};

use crate::summary::{PerResource, Summary};

/// Percentiles are those of completed requests, so a contract also limits how many requests may stay without an answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contract {
    pub ttft_ms_p95_max: Option<f64>,
    pub tpot_ms_p95_max: Option<f64>,
    pub e2e_ms_p99_max: Option<f64>,
    /// US dollars for a million output tokens of requests that met the SLO.
    pub dollars_per_million_accepted_tokens_max: Option<f64>,
    /// Refused, failed and cancelled requests by all: one in a hundred unless the file says otherwise.
    #[serde(default = "unserved_share_max")]
    pub unserved_share_max: f64,
}

fn unserved_share_max() -> f64 {
    0.01
}

/// A limit that no run can be judged by.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ContractError {
    #[error("{name} is {value}; a limit is a number above 0")]
    BadLimit { name: &'static str, value: f64 },
    #[error("unserved_share_max is {value}; it is a share from 0 to 1")]
    BadShare { value: f64 },
    #[error(
        "the contract has no limit: give at least one of ttft_ms_p95_max, tpot_ms_p95_max, e2e_ms_p99_max, dollars_per_million_accepted_tokens_max"
    )]
    Empty,
}

/// One limit and what was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Clause {
    pub name: String,
    pub limit: f64,
    /// `None`: nothing was measured, so the limit is not met: no request completed, no price is known, or answers of several tokens
    /// came in one event each, so that nobody knows how fast their tokens came.
    pub measured: Option<f64>,
    pub is_met: bool,
}

impl Contract {
    pub fn check(&self) -> Result<(), ContractError> {
        let limits = self.limits();
        if limits.iter().all(|(_, limit)| limit.is_none()) {
            return Err(ContractError::Empty);
        }
        let is_good = |limit: f64| limit.is_finite() && limit > 0.0;
        let bad = limits
            .into_iter()
            .find_map(|(name, limit)| Some((name, limit.filter(|limit| !is_good(*limit))?)));
        if let Some((name, value)) = bad {
            return Err(ContractError::BadLimit { name, value });
        }
        match (0.0..=1.0).contains(&self.unserved_share_max) {
            true => Ok(()),
            false => Err(ContractError::BadShare {
                value: self.unserved_share_max,
            }),
        }
    }
    fn limits(&self) -> [(&'static str, Option<f64>); 4] {
        [
            ("ttft_ms_p95_max", self.ttft_ms_p95_max),
            ("tpot_ms_p95_max", self.tpot_ms_p95_max),
            ("e2e_ms_p99_max", self.e2e_ms_p99_max),
            (
                "dollars_per_million_accepted_tokens_max",
                self.dollars_per_million_accepted_tokens_max,
            ),
        ]
    }
    /// The limits in the order of the file, each with its figure. An answer of one token has no TPOT: a run of such answers
    /// meets every limit of it.
    pub fn judge(&self, summary: &Summary, per_resource: &PerResource) -> Vec<Clause> {
        let tpot = summary.tpot_ms.map(|tpot| tpot.p95);
        let measured = [
            summary.ttft_ms.map(|ttft| ttft.p95),
            tpot.or_else(|| tpot_without_gaps(summary)),
            summary.e2e_ms.map(|e2e| e2e.p99),
            per_resource.dollars_per_million_accepted_tokens,
        ];
        let limits = self.limits().into_iter().zip(measured);
        let mut clauses: Vec<Clause> = limits
            .filter_map(|((name, limit), measured)| Some(clause(name, limit?, measured)))
            .collect();
        let unserved = (summary.counts.measured > 0).then(|| summary.counts.unserved_share());
        clauses.push(clause("unserved_share_max", self.unserved_share_max, unserved));
        clauses
    }
}

/// 0 where every answer had one token. A run without a gap in which some answer had more is not judged: `vllm bench serve` counts a
/// TPOT of 0 for such an answer, so that a server which sends everything at the end would meet every limit.
fn tpot_without_gaps(summary: &Summary) -> Option<f64> {
    let throughput = summary.throughput;
    let has_answers = throughput.requests_per_s > 0.0;
    let has_one_token_each = throughput.output_tokens_per_s <= throughput.requests_per_s;
    (has_answers && has_one_token_each).then_some(0.0)
}

fn clause(name: &str, limit: f64, measured: Option<f64>) -> Clause {
    Clause {
        name: name.to_owned(),
        limit,
        measured,
        is_met: measured.is_some_and(|measured| measured <= limit),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comparison::Resources;
    use crate::record::Outcome;
    use crate::test_kit::{request, run, slo};

    fn contract() -> Contract {
        Contract {
            ttft_ms_p95_max: Some(1000.0),
            tpot_ms_p95_max: Some(40.0),
            e2e_ms_p99_max: Some(15_000.0),
            dollars_per_million_accepted_tokens_max: None,
            unserved_share_max: 0.01,
        }
    }

    fn unmet(contract: &Contract, run: &crate::record::Run) -> Vec<String> {
        let summary = Summary::of(run, &slo(1000.0, 100.0));
        let clauses = contract.judge(&summary, &summary.per_resource(&Resources::default()));
        clauses
            .into_iter()
            .filter(|clause| !clause.is_met)
            .map(|clause| clause.name)
            .collect()
    }

    #[test]
    fn each_limit_that_is_broken_is_named() {
        let good = run("good", vec![request(1, &[500, 530, 560])]);
        assert_eq!(unmet(&contract(), &good), Vec::<String>::new());
        let slow = run("slow", vec![request(1, &[1500, 1600, 16_000])]);
        assert_eq!(
            unmet(&contract(), &slow),
            ["ttft_ms_p95_max", "tpot_ms_p95_max", "e2e_ms_p99_max"]
        );
    }

    #[test]
    fn a_run_of_single_tokens_meets_limits_of_tpot_and_many_tokens_in_one_event_are_not_judged() {
        let mut one = run("one", vec![request(1, &[500])]);
        assert_eq!(unmet(&contract(), &one), Vec::<String>::new());
        one.records[0].output_tokens = 20;
        assert_eq!(unmet(&contract(), &one), ["tpot_ms_p95_max"]);
        // llama-server ends an answer with one more event.
        let mut with_an_end = run("one", vec![request(1, &[500, 501])]);
        with_an_end.records[0].output_tokens = 1;
        assert_eq!(unmet(&contract(), &with_an_end), Vec::<String>::new());
    }

    #[test]
    fn fast_answers_to_half_of_the_requests_do_not_meet_a_contract() {
        let mut half = run("half", vec![request(1, &[500, 530]), request(2, &[])]);
        half.records[1].outcome = Outcome::Refused { status: 429 };
        assert_eq!(unmet(&contract(), &half), ["unserved_share_max"]);
    }

    #[test]
    fn a_cost_cap_without_a_price_is_not_met() {
        let capped = Contract {
            dollars_per_million_accepted_tokens_max: Some(1.0),
            ..contract()
        };
        let good = run("good", vec![request(1, &[500, 530])]);
        assert_eq!(unmet(&capped, &good), ["dollars_per_million_accepted_tokens_max"]);
    }

    #[test]
    fn an_empty_run_meets_nothing() {
        assert_eq!(unmet(&contract(), &run("none", Vec::new())).len(), 4);
    }

    #[test]
    fn limits_that_make_no_sense_are_refused() {
        assert_eq!(contract().check(), Ok(()));
        let bad = Contract {
            tpot_ms_p95_max: Some(-1.0),
            ..contract()
        };
        assert!(matches!(
            bad.check(),
            Err(ContractError::BadLimit {
                name: "tpot_ms_p95_max",
                ..
            })
        ));
        let share = Contract {
            unserved_share_max: 1.5,
            ..contract()
        };
        assert!(matches!(share.check(), Err(ContractError::BadShare { .. })));
        let empty: Contract = serde_json::from_str("{}").unwrap();
        assert_eq!(empty.check(), Err(ContractError::Empty));
        assert!(serde_json::from_str::<Contract>(r#"{"ttft_p95": 1}"#).is_err());
    }
}
