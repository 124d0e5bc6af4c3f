//! The report of a comparison: one HTML file, and its twins in Markdown, CSV and JSON. Pure: data in, text out.
//!
//! `view` looks at the data, `sections` say what there is to say as plain text and pictures, `render` makes markup of it.

mod chart;
mod document;
mod render;
mod sections;
pub mod synthetic;
mod text;
mod view;

use std::collections::BTreeMap;

use crate::comparison::{ArmRun, Comparison, Fairness, Shape, Slo};
use crate::record::{LoopKind, Run};

use document::Section;
use view::{Subject, View};

/// A report that can be written in each form.
#[derive(Clone, Debug)]
pub struct Report {
    comparison: Comparison,
    subject: Subject,
}

/// What a single run is judged by and shown with.
#[derive(Clone, Debug)]
pub struct RunFrame {
    pub slo: Slo,
    /// When it was measured, as the report shows it.
    pub date: String,
    /// The command that made it, or that it is not known.
    pub command: String,
}

/// Why a report has no JSON. Its other files can be made.
#[derive(Debug, thiserror::Error)]
pub enum JsonError {
    #[error(
        "`{member}` is {value}, which is a fault of baton: JSON has no such number, so no report could be made of it again"
    )]
    NotFinite { member: &'static str, value: f64 },
    #[error(transparent)]
    Serde(#[from] serde_json::Error),
}

impl Report {
    pub fn of_comparison(comparison: Comparison) -> Report {
        Report {
            comparison,
            subject: Subject::Comparison,
        }
    }

    /// Runs of one arm without a comparison: of the load client, or of the simulator.
    pub fn of_run(run: Run, frame: RunFrame) -> Report {
        let hash = run.environment.get("trace_hash").map(text::value);
        let hypothesis = run.environment.get("hypothesis").and_then(serde_json::Value::as_str);
        let hypothesis = hypothesis.map(str::to_owned);
        let shape = Shape {
            name: match run.loop_kind {
                LoopKind::Simulated => "one simulated run".to_owned(),
                LoopKind::Open | LoopKind::Closed => "one run".to_owned(),
            },
            traffic: run
                .environment
                .get("trace")
                .map_or_else(|| "not described".to_owned(), text::value),
            trace_hash: hash.unwrap_or_else(|| "not recorded".to_owned()),
            contrasts: Vec::new(),
            verdict: String::new(),
            runs: vec![ArmRun {
                arm: run.name.clone(),
                repeat: 0,
                run,
            }],
        };
        let comparison = Comparison {
            date: frame.date,
            command: frame.command,
            hypothesis,
            slo: frame.slo,
            arms: Vec::new(),
            shapes: vec![shape],
            fairness: Fairness::default(),
            environment: BTreeMap::new(),
        };
        Report {
            comparison,
            subject: Subject::Run,
        }
    }

    /// One file that needs nothing else.
    pub fn html(&self) -> String {
        let view = View::new(&self.comparison, self.subject);
        render::html::page(&render::html::Page {
            title: &self.title(),
            subtitle: &self.subtitle(),
            alerts: &sections::alerts(&view),
            sections: &sections::all(&view),
            data: &render::json::embedded(&self.comparison),
        })
    }

    /// The same without pictures.
    pub fn markdown(&self) -> String {
        let view = View::new(&self.comparison, self.subject);
        let sections: Vec<Section> = sections::all(&view);
        render::markdown::page(&self.title(), &self.subtitle(), &sections::alerts(&view), &sections)
    }

    /// One line for each request.
    pub fn csv(&self) -> String {
        render::csv::lines(&self.comparison)
    }

    /// Everything, for [`crate::comparison::Comparison`]'s readers. It is what a report can be made of again.
    ///
    /// # Errors
    /// A figure is not finite. JSON has no such number: serde_json would write `null`, of which no report can be made.
    pub fn json(&self) -> Result<String, JsonError> {
        if let Some((member, value)) = not_finite(&self.comparison) {
            return Err(JsonError::NotFinite { member, value });
        }
        Ok(serde_json::to_string(&self.comparison)?)
    }

    fn title(&self) -> String {
        let arms = self.comparison.arms.len();
        match self.subject {
            Subject::Run => "One run, not a comparison".to_owned(),
            Subject::Comparison => format!("Comparison of {arms} arms"),
        }
    }

    fn subtitle(&self) -> String {
        let comparison = &self.comparison;
        let runs = comparison.shapes.iter().flat_map(|shape| &shape.runs);
        let is_simulated = runs.clone().any(|run| run.run.loop_kind == LoopKind::Simulated);
        let requests: usize = runs.clone().map(|run| run.run.records.len()).sum();
        let source = if is_simulated {
            "simulated in virtual time"
        } else {
            "measured"
        };
        format!(
            "{}; shapes of traffic: {}, runs: {}, requests: {requests}; {source}. Made by: {}",
            comparison.date,
            comparison.shapes.len(),
            runs.count(),
            comparison.command
        )
    }
}

/// A figure that is not finite, with the name of its member.
fn not_finite(comparison: &Comparison) -> Option<(&'static str, f64)> {
    let slo = &comparison.slo;
    let limits = [("ttft_ms_max", slo.ttft_ms_max), ("itl_ms_max", slo.itl_ms_max)];
    let prices = comparison.arms.iter().filter_map(|arm| arm.resources.price_per_hour);
    let points = comparison.arms.iter().flat_map(|arm| &arm.tuning).flat_map(|point| {
        [
            ("goodput", point.goodput),
            ("ttft_ms_p99", point.ttft_ms_p99),
            ("itl_ms_p99", point.itl_ms_p99),
        ]
    });
    let contrasts = comparison.shapes.iter().flat_map(|shape| &shape.contrasts);
    let contrasts = contrasts.flat_map(|contrast| {
        [
            ("load", contrast.load),
            ("baseline_value", contrast.baseline_value),
            ("candidate_value", contrast.candidate_value),
            ("ratio", contrast.ratio),
            ("ratio_low", contrast.ratio_low),
            ("ratio_high", contrast.ratio_high),
        ]
    });
    let runs = || comparison.shapes.iter().flat_map(|shape| &shape.runs);
    let servers = runs()
        .flat_map(|run| &run.run.records)
        .filter_map(|record| record.server.as_ref());
    let times = servers.flat_map(|server| {
        let stages = server.stages.iter().map(|(_, ms)| ("stages", *ms));
        stages.chain(server.kv_transfer_ms.map(|ms| ("kv_transfer_ms", ms)))
    });
    let figures = limits.into_iter().chain(prices.map(|price| ("price_per_hour", price)));
    let figures = figures.chain(points).chain(contrasts).chain(times);
    let mut figures = figures.chain(runs().map(|run| ("offered", run.run.offered)));
    figures.find(|(_, value)| !value.is_finite())
}

#[cfg(test)]
mod tests;
