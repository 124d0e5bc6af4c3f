//! The sweep that tunes an arm: which point is chosen, and how a sweep is stored and used again.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use workload::comparison::{ArmKind, Slo, TuningPoint};
use workload::record::Run;
use workload::summary::Summary;

use super::costs::Costs;
use super::machine::MachineFacts;
use super::point::Point;
use crate::exit::{Exit, WithExit};

/// Goodputs that differ by less are equal; the latencies decide then. One request more or less is as much in a short run.
const EQUAL_SHARE: f64 = 0.05;
/// A sweep has a few dozen points.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// A point of a sweep and what it gave.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Tried {
    pub point: Point,
    pub goodput: f64,
    /// `None`: no answer had such a time.
    pub ttft_ms_p99: Option<f64>,
    pub itl_ms_p99: Option<f64>,
    /// The figures are no evidence, because the client sent late. Older files do not say it.
    #[serde(default)]
    pub is_client_late: bool,
}

impl Tried {
    pub fn of(point: Point, run: &Run, slo: &Slo) -> Self {
        let summary = Summary::of(run, slo);
        Self {
            point,
            goodput: summary.goodput_per_s,
            ttft_ms_p99: summary.ttft_ms.map(|times| times.p99),
            itl_ms_p99: summary.itl_ms.map(|times| times.p99),
            is_client_late: !summary.lag.is_valid,
        }
    }

    /// How near its p99s are to their limits; the worse of the two counts.
    fn strain(&self, slo: &Slo) -> f64 {
        let share = |value: Option<f64>, limit: f64| value.map_or(f64::INFINITY, |value| value / limit.max(1e-9));
        share(self.ttft_ms_p99, slo.ttft_ms_max).max(share(self.itl_ms_p99, slo.itl_ms_max))
    }

    fn for_report(&self, cores: u32, is_chosen: bool) -> TuningPoint {
        let mut settings = self.point.settings(cores);
        if self.is_client_late {
            settings.insert("client_was_late".to_owned(), true.into());
        }
        TuningPoint {
            settings,
            goodput: self.goodput,
            // The file's JSON has no infinity. Nothing was answered, which the goodput of 0 tells.
            ttft_ms_p99: self.ttft_ms_p99.unwrap_or(0.0),
            itl_ms_p99: self.itl_ms_p99.unwrap_or(0.0),
            is_chosen,
        }
    }
}

/// The best point: the highest goodput, and among those that are about as high the one whose p99s are farthest below their limits.
/// A point of a late client is taken only where there is no other.
pub(super) fn best(tried: &[Tried], slo: &Slo) -> Option<usize> {
    let all = || tried.iter().enumerate();
    let mut candidates: Vec<(usize, &Tried)> = all().filter(|(_, one)| !one.is_client_late).collect();
    if candidates.is_empty() {
        candidates = all().collect();
    }
    let highest = candidates.iter().map(|(_, one)| one.goodput).fold(0.0, f64::max);
    let is_near = |one: &&(usize, &Tried)| one.1.goodput >= highest * (1.0 - EQUAL_SHARE);
    let near = candidates.iter().filter(is_near);
    near.min_by(|a, b| a.1.strain(slo).total_cmp(&b.1.strain(slo)))
        .map(|(index, _)| *index)
}

/// The sweep of one kind of arm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ArmSweep {
    pub kind: ArmKind,
    pub tried: Vec<Tried>,
    pub chosen: usize,
}

impl ArmSweep {
    pub fn chosen(&self) -> Option<Point> {
        self.tried.get(self.chosen).map(|one| one.point)
    }

    /// Whether the client was on time when the chosen point was measured.
    pub fn is_evidence(&self) -> bool {
        let chosen = self.tried.get(self.chosen);
        chosen.is_some_and(|one| !one.is_client_late)
    }

    pub fn for_report(&self, cores: u32) -> Vec<TuningPoint> {
        let points = self.tried.iter().enumerate();
        points
            .map(|(index, one)| one.for_report(cores, index == self.chosen))
            .collect()
    }
}

/// A sweep as it is stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Sweeps {
    /// `YYYY-MM-DD`
    pub date: String,
    pub machine: MachineFacts,
    /// The traffic for which the arms were tuned, and its rate.
    pub traffic: String,
    pub rate: f64,
    pub slo: Slo,
    pub costs: Option<Costs>,
    pub arms: Vec<ArmSweep>,
}

impl Sweeps {
    pub fn arm(&self, kind: ArmKind) -> Option<&ArmSweep> {
        self.arms.iter().find(|arm| arm.kind == kind)
    }

    /// In one sentence, for the fairness list.
    pub fn words(&self, is_stored: bool) -> String {
        let counts: BTreeMap<&str, usize> = self
            .arms
            .iter()
            .map(|arm| (name_of(arm.kind), arm.tried.len()))
            .collect();
        let counts: Vec<String> = counts
            .iter()
            .map(|(name, count)| format!("{name} {count} points"))
            .collect();
        let tried = self.arms.iter().flat_map(|arm| &arm.tried);
        let late = match tried.filter(|one| one.is_client_late).count() {
            0 => String::new(),
            late => format!("; {late} of the points count for nothing, because the client was late"),
        };
        let source = match is_stored {
            true => format!("a stored sweep of {}", self.date),
            false => "a sweep in this run".to_owned(),
        };
        format!(
            "{source} over step budget, sequences, split and threshold: {}, each at {:.2} requests/s of {}, judged by TTFT {} ms and ITL {} ms{late}",
            counts.join(", "),
            self.rate,
            self.traffic,
            self.slo.ttft_ms_max,
            self.slo.itl_ms_max
        )
    }

    /// # Errors
    /// The file cannot be read, or it was made on another machine, with another model or without one of these arms.
    pub fn read(path: &Path, machine: &MachineFacts, kinds: &[ArmKind]) -> anyhow::Result<Self> {
        let read = || -> anyhow::Result<Self> {
            let length = std::fs::metadata(path)?.len();
            ensure!(
                length <= FILE_BYTES_MAX,
                "it has {length} bytes, at most {FILE_BYTES_MAX} are read"
            );
            let sweeps: Self = serde_json::from_slice(&std::fs::read(path)?)
                .context("it is no stored sweep of `baton compare --save-tuning`")?;
            sweeps.check(machine, kinds)?;
            Ok(sweeps)
        };
        read()
            .with_context(|| format!("--tuning {}", path.display()))
            .exit(Exit::Usage)
    }

    fn check(&self, machine: &MachineFacts, kinds: &[ArmKind]) -> anyhow::Result<()> {
        ensure!(
            self.machine == *machine,
            "it was made on {}, and this is {}: tune again, without --tuning",
            serde_json::to_string(&self.machine)?,
            serde_json::to_string(machine)?
        );
        for kind in kinds {
            let chosen = self.arm(*kind).and_then(ArmSweep::chosen);
            let chosen = chosen.with_context(|| format!("it has no chosen point of the {} arm", name_of(*kind)))?;
            let cores: u32 = chosen
                .cores_of_nodes(machine.node_cores)
                .iter()
                .map(|(_, count)| count)
                .sum();
            ensure!(
                cores == machine.node_cores,
                "a chosen point uses {cores} of {} cores",
                machine.node_cores
            );
        }
        Ok(())
    }

    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(self)?;
        std::fs::write(path, text + "\n").with_context(|| format!("cannot write --save-tuning {}", path.display()))
    }
}

pub(super) fn name_of(kind: ArmKind) -> &'static str {
    match kind {
        ArmKind::CoLocated => "co-located",
        ArmKind::Disaggregated => "disaggregated",
        ArmKind::Conditional => "conditional",
        ArmKind::External => "external",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slo() -> Slo {
        Slo {
            name: "custom".to_owned(),
            ttft_ms_max: 100.0,
            itl_ms_max: 50.0,
        }
    }

    fn tried(goodput: f64, ttft: Option<f64>, itl: Option<f64>) -> Tried {
        Tried {
            point: Point::co_located(2),
            goodput,
            ttft_ms_p99: ttft,
            itl_ms_p99: itl,
            is_client_late: false,
        }
    }

    #[test]
    fn a_point_of_a_late_client_is_chosen_only_where_there_is_no_other() {
        let on_time = tried(1.0, Some(9.0), Some(9.0));
        let late = Tried {
            is_client_late: true,
            ..tried(9.0, Some(1.0), Some(1.0))
        };
        let both = [late, on_time];
        assert_eq!(best(&both, &slo()), Some(1));
        assert_eq!(best(&both[..1], &slo()), Some(0));
        let sweep = |chosen| ArmSweep {
            kind: ArmKind::CoLocated,
            tried: both.to_vec(),
            chosen,
        };
        assert!(sweep(1).is_evidence() && !sweep(0).is_evidence());
    }

    #[test]
    fn goodput_decides_and_latency_among_equals() {
        let best = |all: &[Tried]| best(all, &slo());
        assert_eq!(
            best(&[tried(1.0, Some(9.0), Some(9.0)), tried(2.0, Some(99.0), Some(49.0))]),
            Some(1)
        );
        assert_eq!(
            best(&[tried(2.0, Some(90.0), Some(1.0)), tried(1.95, Some(10.0), Some(10.0))]),
            Some(1)
        );
        assert_eq!(best(&[tried(0.0, None, None), tried(0.0, Some(900.0), None)]), Some(0));
        assert_eq!(best(&[]), None);
    }

    fn sweeps() -> Sweeps {
        Sweeps {
            date: "2026-11-25".to_owned(),
            machine: MachineFacts {
                cpu: "a CPU".to_owned(),
                node_cores: 2,
                model_file: "m.gguf".to_owned(),
                model_bytes: 9,
                engine: "cpu".to_owned(),
            },
            traffic: "short".to_owned(),
            rate: 2.0,
            slo: slo(),
            costs: None,
            arms: vec![ArmSweep {
                kind: ArmKind::CoLocated,
                tried: vec![tried(1.0, Some(9.0), None), tried(2.0, Some(9.0), None)],
                chosen: 1,
            }],
        }
    }

    #[test]
    fn a_stored_sweep_is_used_only_on_its_machine_with_its_model() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tuning.json");
        let sweeps = sweeps();
        sweeps.write(&path).expect("written");
        let kinds = [ArmKind::CoLocated];
        assert_eq!(
            Sweeps::read(&path, &sweeps.machine, &kinds).expect("the same machine"),
            sweeps
        );
        assert!(sweeps.words(true).contains("2026-11-25"), "{}", sweeps.words(true));
        for other in [
            MachineFacts {
                node_cores: 4,
                ..sweeps.machine.clone()
            },
            MachineFacts {
                model_bytes: 8,
                ..sweeps.machine.clone()
            },
            MachineFacts {
                cpu: "another".to_owned(),
                ..sweeps.machine.clone()
            },
        ] {
            let error = Sweeps::read(&path, &other, &kinds).expect_err("another machine");
            assert_eq!(crate::exit::of(&error), Exit::Usage);
        }
        let kinds = [ArmKind::Conditional];
        assert!(Sweeps::read(&path, &sweeps.machine, &kinds).is_err(), "no such arm");
        std::fs::write(&path, "{}").expect("written");
        assert!(Sweeps::read(&path, &sweeps.machine, &[]).is_err());
    }

    #[test]
    fn rejected_points_are_kept() {
        let sweeps = sweeps();
        let points = sweeps.arms[0].for_report(2);
        assert_eq!(
            points.iter().map(|point| point.is_chosen).collect::<Vec<_>>(),
            [false, true]
        );
        assert_eq!(points[0].goodput, 1.0);
    }
}
