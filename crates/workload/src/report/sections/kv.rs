//! What the handoff of the KV costs, by prompt length.

use super::each_shape;
use crate::record::RequestRecord;
use crate::report::document::{Section, Table};
use crate::report::text::{bytes, maybe, percent, short, tick};
use crate::report::view::{LoadView, View};
use crate::statistics::Samples;

/// Prompt lengths that share a row: up to so many tokens.
const LENGTHS: [u32; 11] = [64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 65_536, u32::MAX];

/// One handoff as the server tells it.
struct Handoff {
    ttft_ms: f64,
    bytes: f64,
    ms: f64,
}

pub fn section(view: &View<'_>) -> Section {
    let mut section = Section::new("kv", "Cost of the KV transfer");
    section.text(
        "Medians of the requests whose KV was handed off. Much of a transfer happens while later parts of the prompt are still \
         computed, so its share of TTFT says how long it took beside the first token, not how much later the token came.",
    );
    each_shape(view, &mut section, |shape, section| {
        let Some(load) = shape.headline() else { return };
        let none = "The server told of no KV transfer: nothing was handed off, or it is not a coordinator of baton.";
        section.table_or(table(load), none);
    });
    section
}

fn table(load: &LoadView<'_>) -> Table {
    let mut table = Table::new(
        format!("KV transfers at {}, medians", load.words()),
        &[
            "prompt tokens",
            "arm",
            "#requests",
            "#TTFT, ms",
            "#KV",
            "#transfer, ms",
            "#rate, GB/s",
            "#transfer by TTFT",
        ],
    );
    let mut from = 1;
    for to in LENGTHS {
        for arm in &load.arms {
            let inside = arm
                .completed()
                .filter(|record| (from..=to).contains(&record.prompt_tokens));
            let handoffs: Vec<Handoff> = inside.filter_map(handoff).collect();
            if handoffs.is_empty() {
                continue;
            }
            let median = |of: fn(&Handoff) -> f64| Samples::new(handoffs.iter().map(of)).percentile(50.0);
            table.row(vec![
                match to {
                    u32::MAX => format!("{} and more", tick(f64::from(from))),
                    _ => format!("{} to {}", tick(f64::from(from)), tick(f64::from(to))),
                },
                short(arm.name),
                handoffs.len().to_string(),
                maybe(median(|handoff| handoff.ttft_ms)),
                median(|handoff| handoff.bytes).map_or_else(String::new, bytes),
                maybe(median(|handoff| handoff.ms)),
                maybe(median(|handoff| handoff.bytes / handoff.ms / 1e6)),
                median(|handoff| handoff.ms / handoff.ttft_ms).map_or_else(String::new, percent),
            ]);
        }
        from = to.saturating_add(1);
    }
    table
}

fn handoff(record: &RequestRecord) -> Option<Handoff> {
    let server = record.server.as_ref()?;
    Some(Handoff {
        ttft_ms: record.ttft_ms()?,
        bytes: server.kv_bytes.filter(|bytes| *bytes > 0)? as f64,
        ms: server.kv_transfer_ms?,
    })
}
