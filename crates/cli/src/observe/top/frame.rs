//! One frame of `baton top`: lines that fit the screen.

use std::time::{Duration, Instant};

use console::truncate_str;
use coordinator::records::pages::{ClusterPage, NodePage};
use coordinator::records::shape::Summary;

use super::state::{Percentiles, Running, State};
use crate::observe::cluster::{KvUse, is_ready, kv_use, waiting_words};
use crate::observe::format::{clean, ms, ms_or_dash, or_dash, seconds};
use crate::observe::look::Look;
use crate::observe::nodes;
use crate::observe::records::way;
use crate::observe::table::{Cell, Table};
use crate::terminal::Paint;

const KV_BAR_CELLS: usize = 24;
/// The page of the cluster comes each second. After this time the picture is old.
const STALE_AFTER: Duration = Duration::from_secs(5);
/// A percentile of fewer requests says little.
const SAMPLES_MIN: usize = 100;

/// At most `rows` lines of at most `look.width` columns.
pub fn lines(state: &State, url: &str, (now, rows): (Instant, usize), look: Look) -> Vec<String> {
    let mut lines = vec![title(state, url, look)];
    lines.extend(warnings(state, now, look));
    if let Some(cluster) = &state.cluster {
        lines.push(clean(&format!(
            "waiting: {}   unfinished: {}   running here: {}",
            waiting_words(&cluster.coordinator),
            cluster.coordinator.unfinished,
            state.running.len()
        )));
    }
    let ended: Vec<&Summary> = state.ended(now).collect();
    lines.push(ended_words(&ended));
    lines.push(String::new());
    lines.extend(latencies(&ended).render(look.terminal).lines().map(str::to_owned));
    lines.push(String::new());
    if let Some(cluster) = &state.cluster {
        lines.extend(
            nodes_table(cluster, look)
                .render(look.terminal)
                .lines()
                .map(str::to_owned),
        );
        lines.push(String::new());
    }
    let room = rows.saturating_sub(lines.len());
    lines.extend(running(state, now, room, look));
    lines.truncate(rows);
    // A colour that is cut open stays closed: the codes behind the cut are kept.
    let fitting = lines.iter().map(|line| truncate_str(line, look.width, "").into_owned());
    fitting.collect()
}

fn title(state: &State, url: &str, look: Look) -> String {
    let name = look.terminal.paint("baton top", Paint::Bold);
    let Some(ClusterPage { coordinator, .. }) = &state.cluster else {
        return format!("{name}  {url}  waiting for the first page");
    };
    let (words, paint) = match (is_ready(coordinator), &coordinator.not_ready_because) {
        (true, _) if coordinator.unsplit_because.is_some() => ("ready, but unsplit".to_owned(), Paint::Warn),
        (true, _) => ("ready".to_owned(), Paint::Good),
        (false, Some(because)) => (format!("not ready: {because}"), Paint::Bad),
        (false, None) => ("not ready".to_owned(), Paint::Bad),
    };
    format!(
        "{name}  {}  {}  up {}  {}   {}",
        clean(url),
        clean(coordinator.model.as_deref().unwrap_or_default()),
        seconds(coordinator.uptime_s as f64),
        look.terminal.paint(&clean(&words), paint),
        look.terminal.paint("q quits", Paint::Dim)
    )
}

fn warnings(state: &State, now: Instant, look: Look) -> Vec<String> {
    let mut words = Vec::new();
    let silent = now.saturating_duration_since(state.told_at);
    if let Some(why) = &state.lost_because {
        words.push(format!(
            "the stream broke ({why}); connecting again, what follows is old"
        ));
    } else if silent > STALE_AFTER {
        words.push(format!(
            "no news for {}: what follows is old",
            seconds(silent.as_secs_f64())
        ));
    }
    if state.missed > 0 {
        words.push(format!(
            "{} events were missed; the figures below may lack some requests",
            state.missed
        ));
    }
    let warnings = words.iter();
    warnings
        .map(|words| look.terminal.paint(&clean(words), Paint::Warn))
        .collect()
}

fn ended_words(ended: &[&Summary]) -> String {
    let count = |is: &dyn Fn(&Summary) -> bool| ended.iter().filter(|record| is(record)).count();
    let is = |record: &Summary, outcome: &str| record.outcome.as_deref() == Some(outcome);
    let tokens: u64 = ended.iter().map(|record| u64::from(record.serving.output_tokens)).sum();
    format!(
        "last minute: {} ended, {} ok, {} cancelled, {} failed; {} broke their SLO, {} stalled; {tokens} output tokens",
        ended.len(),
        count(&|record| is(record, "ok")),
        count(&|record| is(record, "cancelled")),
        count(&|record| !is(record, "ok") && !is(record, "cancelled")),
        count(&|record| !record.breached.is_empty()),
        count(&|record| record.stall_count > 0),
    )
}

fn latencies(ended: &[&Summary]) -> Table {
    let mut table = Table::new(&["ms, of the last minute", ">p50", ">p99", ">n"]);
    let mut row = |name: &str, of: &dyn Fn(&Summary) -> Option<f64>| {
        let percentiles = Percentiles::of(ended.iter().filter_map(|record| of(record)));
        // The same rule as in the console: a percentile of few samples is grey.
        let paint = if percentiles.n < SAMPLES_MIN {
            Paint::Dim
        } else {
            Paint::None
        };
        table.row(vec![
            name.into(),
            ms_or_dash(percentiles.p50).into(),
            Cell::new(ms_or_dash(percentiles.p99)).paint(paint),
            percentiles.n.to_string().into(),
        ]);
    };
    row("TTFT", &|record| record.ttft_ms);
    row("ITL, each request's median", &|record| record.itl_p50_ms);
    row("ITL, each request's longest", &|record| record.itl_max_ms);
    row("end to end", &|record| Some(record.e2e_ms));
    table
}

fn nodes_table(cluster: &ClusterPage, look: Look) -> Table {
    let mut table = Table::new(&["node", "role", "state", "KV blocks", ">used", ">running", ">waiting"]);
    for node in &cluster.nodes {
        let kv = kv_use(node);
        table.row(vec![
            Cell::new(&node.name).paint(Paint::Bold),
            Cell::new(&node.role),
            nodes::state(node),
            kv_bar(kv, look.is_ascii).into(),
            kv.map_or_else(|| "-".to_owned(), |kv| format!("{:.0}%", kv.fraction() * 100.0))
                .into(),
            or_dash(node.running).into(),
            waiting(node),
        ]);
    }
    table
}

fn waiting(node: &NodePage) -> Cell {
    let cell = Cell::new(or_dash(node.waiting));
    if node.waiting.is_some_and(|waiting| waiting > 0) {
        cell.paint(Paint::Warn)
    } else {
        cell
    }
}

/// Used blocks, then cached ones, then free ones.
fn kv_bar(kv: Option<KvUse>, is_ascii: bool) -> String {
    let Some(kv) = kv else {
        return "-".to_owned();
    };
    let cells = |count: u64| (count as f64 / kv.total.max(1) as f64 * KV_BAR_CELLS as f64).round() as usize;
    // One block in use must be visible.
    let used = cells(kv.used).max(usize::from(kv.used > 0)).min(KV_BAR_CELLS);
    let cached = cells(kv.cached).min(KV_BAR_CELLS - used);
    let glyphs = if is_ascii {
        ["#", "+", "."]
    } else {
        ["█", "▒", "░"]
    };
    let counts = [used, cached, KV_BAR_CELLS - used - cached];
    glyphs
        .iter()
        .zip(counts)
        .map(|(glyph, count)| glyph.repeat(count))
        .collect()
}

/// The oldest first, because somebody waits for them.
fn running(state: &State, now: Instant, room: usize, look: Look) -> Vec<String> {
    if state.running.is_empty() {
        return vec!["no request is running".to_owned()];
    }
    let mut oldest: Vec<&Running> = state.running.values().collect();
    oldest.sort_by(|a, b| b.age_ms(now).total_cmp(&a.age_ms(now)));
    // The heading, and the line that says how many requests are left out.
    let shown = oldest.len().min(room.saturating_sub(2));
    let mut table = Table::new(&[">seq", ">age ms", "state", "lane", "nodes", ">prompt", ">TTFT ms"]);
    for running in &oldest[..shown] {
        let record = &running.record;
        table.row(vec![
            record.seq.to_string().into(),
            ms(running.age_ms(now)).into(),
            record.state.name().into(),
            Cell::new(&record.lane),
            way(&record.serving).into(),
            record.serving.prompt_tokens.to_string().into(),
            ms_or_dash(record.ttft_ms).into(),
        ]);
    }
    let mut lines: Vec<String> = table.render(look.terminal).lines().map(str::to_owned).collect();
    if shown < oldest.len() {
        lines.push(format!("and {} more", oldest.len() - shown));
    }
    lines
}

#[cfg(test)]
#[path = "frame_tests.rs"]
mod tests;
