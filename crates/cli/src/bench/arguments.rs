//! Flags that several verbs of `baton bench` share: how their runs are judged.

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Context as _;
use clap::Args;
use coordinator::SloConfig;
use workload::comparison::{Resources, Slo};
use workload::contract::{Clause, Contract};
use workload::summary::{Lag, PerResource, Summary};

use crate::exit::{Exit, WithExit as _};

/// A contract has a handful of lines.
const CONTRACT_BYTES_MAX: u64 = 64 << 10;

/// How runs are judged.
#[derive(Clone, Debug, Args)]
pub(super) struct JudgeArgs {
    /// Limits for TTFT and for the p99 of a request's own gaps: chat, voice, code-inline, code-panel, rag, async-batch, or two
    /// numbers of milliseconds such as 300:50.
    #[arg(long, default_value = "chat", value_name = "NAME|TTFT:ITL")]
    pub slo: SloArg,
    #[command(flatten)]
    pub contract: ContractArgs,
}

/// Limits out of a file, and what the server costs.
#[derive(Clone, Debug, Default, Args)]
pub(super) struct ContractArgs {
    /// US dollars for an hour of the server.
    #[arg(long, value_name = "DOLLARS", value_parser = positive)]
    pub price: Option<f64>,
    /// A TOML file with limits that must hold: ttft_ms_p95_max, tpot_ms_p95_max, e2e_ms_p99_max, unserved_share_max,
    /// dollars_per_million_accepted_tokens_max. The exit status is 3 when they do not.
    #[arg(long, value_name = "FILE")]
    pub contract: Option<PathBuf>,
}

/// A profile's name or two limits.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SloArg(pub Slo);

impl FromStr for SloArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some(profile) = SloConfig::default().by_name(text) {
            return Ok(Self(Slo {
                name: profile.name.clone(),
                ttft_ms_max: profile.ttft_max.as_secs_f64() * 1e3,
                itl_ms_max: profile.itl_max.as_secs_f64() * 1e3,
            }));
        }
        let limits = text
            .split_once(':')
            .and_then(|(ttft, itl)| Some((positive(ttft).ok()?, positive(itl).ok()?)));
        let (ttft_ms_max, itl_ms_max) = limits
            .ok_or("write the name of a profile, such as chat, or two numbers of milliseconds, such as 300:50")?;
        Ok(Self(Slo {
            name: "custom".to_owned(),
            ttft_ms_max,
            itl_ms_max,
        }))
    }
}

/// A number above 0.
pub(crate) fn positive(text: &str) -> Result<f64, String> {
    let number = text
        .parse::<f64>()
        .ok()
        .filter(|number| number.is_finite() && *number > 0.0);
    number.ok_or_else(|| format!("`{text}` is no number above 0"))
}

/// The flags, read and checked.
#[derive(Clone, Debug)]
pub(super) struct Judge {
    pub slo: Slo,
    pub resources: Resources,
    pub contract: Option<Contract>,
}

impl JudgeArgs {
    /// # Errors
    /// As [`ContractArgs::judge`].
    pub fn read(&self) -> anyhow::Result<Judge> {
        self.contract.judge(self.slo.0.clone())
    }
}

impl ContractArgs {
    /// # Errors
    /// The contract cannot be read, or its limits make no sense.
    pub fn judge(&self, slo: Slo) -> anyhow::Result<Judge> {
        let contract = self.contract.as_deref().map(|path| {
            let at = || format!("the contract {}", path.display());
            read_contract(path).with_context(at).exit(Exit::Usage)
        });
        Ok(Judge {
            slo,
            resources: Resources {
                price_per_hour: self.price,
                ..Resources::default()
            },
            contract: contract.transpose()?,
        })
    }
}

fn read_contract(path: &std::path::Path) -> anyhow::Result<Contract> {
    let length = std::fs::metadata(path)?.len();
    anyhow::ensure!(
        length <= CONTRACT_BYTES_MAX,
        "it has {length} bytes; a contract has a few lines"
    );
    let contract: Contract = toml::from_str(&std::fs::read_to_string(path)?)?;
    contract.check()?;
    Ok(contract)
}

impl Judge {
    pub fn per_resource(&self, summary: &Summary) -> PerResource {
        summary.per_resource(&self.resources)
    }
    /// The clauses of the contract. Empty without one.
    pub fn clauses(&self, summary: &Summary) -> Vec<Clause> {
        let contract = self.contract.as_ref();
        contract
            .map(|contract| contract.judge(summary, &self.per_resource(summary)))
            .unwrap_or_default()
    }
}

/// A line for each limit.
pub(super) fn clause_lines(clauses: &[Clause]) -> String {
    let line = |clause: &Clause| {
        let measured = clause
            .measured
            .map_or("nothing".to_owned(), |measured| format!("{measured:.3}"));
        let met = if clause.is_met { "met" } else { "NOT MET" };
        format!(
            "contract: {} {} {met}, measured {measured}\n",
            clause.name, clause.limit
        )
    };
    clauses.iter().map(line).collect()
}

/// The status that a contract gives a run; without a contract nothing is asked. A client that was late offered less than the load has, so
/// its figures decide nothing.
pub(super) fn status(clauses: &[Clause], lag: &Lag) -> Exit {
    match (clauses.is_empty(), lag.is_valid, is_met(clauses)) {
        (true, _, _) | (false, true, true) => Exit::Ok,
        (false, true, false) => Exit::NotMet,
        (false, false, _) => Exit::NoVerdict,
    }
}

/// Whether every limit is met.
pub(super) fn is_met(clauses: &[Clause]) -> bool {
    clauses.iter().all(|clause| clause.is_met)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_client_gives_a_contract_no_verdict() {
        let clause = |is_met| Clause {
            name: "ttft_ms_p95_max".to_owned(),
            limit: 1.0,
            measured: Some(1.0),
            is_met,
        };
        let lag = |is_valid| Lag {
            ms_p50: 0.0,
            ms_p99: 9.0,
            ms_max: 9.0,
            is_valid,
        };
        assert_eq!(status(&[clause(true)], &lag(true)), Exit::Ok);
        assert_eq!(status(&[clause(true), clause(false)], &lag(true)), Exit::NotMet);
        for is_met in [true, false] {
            assert_eq!(status(&[clause(is_met)], &lag(false)), Exit::NoVerdict);
        }
        assert_eq!(status(&[], &lag(false)), Exit::Ok);
    }

    #[test]
    fn an_slo_is_a_name_or_two_limits() {
        let slo = |text: &str| {
            text.parse::<SloArg>()
                .map(|slo| (slo.0.name, slo.0.ttft_ms_max, slo.0.itl_ms_max))
        };
        assert_eq!(slo("rag"), Ok(("rag".to_owned(), 400.0, 80.0)));
        assert_eq!(slo("1000:12.5"), Ok(("custom".to_owned(), 1000.0, 12.5)));
        for bad in ["", "fast", "1000", "0:5", "1:inf", "1:2:3"] {
            assert!(slo(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_contract_is_read_and_checked() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("contract.toml");
        let read = |text: &str| {
            std::fs::write(&file, text).unwrap();
            read_contract(&file)
        };
        let contract = read("ttft_ms_p95_max = 1000\ntpot_ms_p95_max = 40.5\n").unwrap();
        assert_eq!(
            (contract.ttft_ms_p95_max, contract.tpot_ms_p95_max),
            (Some(1000.0), Some(40.5))
        );
        for bad in [
            "",
            "ttft_ms_p95_max = 0",
            "ttft_p95 = 3",
            "ttft_ms_p95_max = [",
            "unserved_share_max = 0.5",
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
        assert!(
            read(&"# a long file\n".repeat(10_000))
                .unwrap_err()
                .to_string()
                .contains("bytes")
        );
    }
}
