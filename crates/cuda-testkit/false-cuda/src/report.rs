//! Owns what a run tells at its end: what was done, what was left, what was found.

use std::collections::BTreeMap;

use ptx_vm::Finding;
use serde::Serialize;

use crate::objects::{Origin, PinnedBy};
use crate::state::State;

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ReportedFinding {
    pub kind: String,
    /// The kernel, or the call of the host.
    pub kernel: String,
    pub line: u32,
    pub other_line: u32,
    pub count: u64,
    pub first: String,
}

/// What was made and not given back.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Leaks {
    pub allocations: usize,
    pub bytes: usize,
    pub imported: usize,
    pub pinned: usize,
    pub registered: usize,
    pub streams: usize,
    pub events: usize,
    pub modules: usize,
    pub graphs: usize,
    pub contexts: usize,
}

#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub launches: u64,
    pub thread_instructions: u64,
    /// How often each function was called.
    pub calls: BTreeMap<&'static str, u64>,
    pub leaks: Leaks,
    /// Work that no device came to.
    pub unfinished_operations: usize,
    /// What ended a context, in words.
    pub faults: Vec<String>,
    pub findings: Vec<ReportedFinding>,
}

fn leaks(state: &State) -> Leaks {
    let owned = || {
        state
            .allocations
            .values()
            .filter(|memory| !matches!(memory.origin, Origin::Imported { .. }))
    };
    let pinned_by = |by| state.pinned.values().filter(|pinned| pinned.by == by).count();
    Leaks {
        allocations: owned().count(),
        bytes: owned().map(|memory| memory.bytes).sum(),
        imported: state.allocations.len() - owned().count(),
        pinned: pinned_by(PinnedBy::Allocated),
        registered: pinned_by(PinnedBy::Registered),
        streams: state.stream_handles.len(),
        events: state.events.len(),
        modules: state.modules.len(),
        graphs: state.graphs.len() + state.executables.len(),
        contexts: state.devices.iter().map(|device| device.retained as usize).sum(),
    }
}

pub(crate) fn of(state: &State) -> Report {
    let reported = |finding: &Finding| ReportedFinding {
        kind: finding.kind.to_string(),
        kernel: finding.kernel.clone(),
        line: finding.line,
        other_line: finding.other_line,
        count: finding.count,
        first: finding.first.clone(),
    };
    Report {
        launches: state.launches,
        thread_instructions: state.thread_instructions,
        calls: state.calls.clone(),
        leaks: leaks(state),
        unfinished_operations: state.streams.iter().map(|stream| stream.queue.len()).sum(),
        faults: state.faults.clone(),
        findings: state.findings.list().into_iter().map(reported).collect(),
    }
}

/// Writes the report where the setting says. Without a path, findings and faults go to standard error, and nothing else does.
pub(crate) fn write(state: &mut State) {
    let report = of(state);
    let path = state
        .settings
        .as_ref()
        .ok()
        .and_then(|settings| settings.report.clone());
    let Some(path) = path else {
        for fault in &report.faults {
            eprintln!("false cuda: fault: {fault}");
        }
        for ReportedFinding {
            kind,
            kernel,
            line,
            other_line,
            count,
            first,
        } in &report.findings
        {
            eprintln!(
                "false cuda: {kind} in {kernel}, line {line}, other line {other_line}, {count} times, first: {first}"
            );
        }
        return;
    };
    let path = path.to_string_lossy().replace("%p", &std::process::id().to_string());
    let text = serde_json::to_vec_pretty(&report).unwrap_or_default();
    if let Err(error) = std::fs::write(&path, text) {
        eprintln!("false cuda: the report {path} cannot be written: {error}; name a path in a folder that exists");
    }
}
