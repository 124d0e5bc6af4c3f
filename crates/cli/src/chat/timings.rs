//! The line behind each answer: where its time went, from the server's `metrics` and from the client's own clock.

use std::time::Instant;

use serde::{Deserialize, Serialize};

/// The part of the server's `metrics` object that is shown. An absent member means that the request did not pass that
/// stage, or that the server is older.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Metrics {
    pub queue_ms: Option<f64>,
    pub prefill_ms: Option<f64>,
    pub kv_transfer_ms: Option<f64>,
    pub ttft_ms: Option<f64>,
    pub tokens_per_second: Option<f64>,
    pub prefill_node: Option<String>,
    pub decode_node: Option<String>,
    pub local_prefill: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Usage {
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
}

/// The times at which the client got text.
#[derive(Debug)]
pub struct Timings {
    asked: Instant,
    first: Option<Instant>,
}

impl Timings {
    pub fn start() -> Self {
        Self {
            asked: Instant::now(),
            first: None,
        }
    }

    pub fn on_text(&mut self) {
        self.first.get_or_insert_with(Instant::now);
    }

    /// `queue 0.2 ms, prefill 31.0 ms, transfer 4.1 ms, first token 37.9 ms, 41.3 tokens/s (28 tokens; ...)`
    pub fn line(&self, metrics: Option<&Metrics>, usage: Option<&Usage>) -> String {
        let metrics = metrics.cloned().unwrap_or_default();
        let seen_first = self.first.map(|first| (first - self.asked).as_secs_f64() * 1e3);
        let mut parts = Vec::new();
        let mut add = |name: &str, value: Option<f64>| {
            if let Some(value) = value {
                parts.push(format!("{name} {value:.1} ms"));
            }
        };
        add("queue", metrics.queue_ms);
        add("prefill", metrics.prefill_ms);
        add("transfer", metrics.kv_transfer_ms);
        // The client's own measure includes the network. It is used when the server sends none.
        add("first token", metrics.ttft_ms.or(seen_first));
        if let Some(rate) = metrics.tokens_per_second {
            parts.push(format!("{rate:.1} tokens/s"));
        }
        let mut notes = Vec::new();
        if let Some(usage) = usage {
            notes.push(format!(
                "{} prompt, {} output tokens",
                usage.prompt_tokens, usage.completion_tokens
            ));
        }
        match (&metrics.prefill_node, &metrics.decode_node, &metrics.local_prefill) {
            (_, Some(decode), Some(reason)) => notes.push(format!("{decode}, prefilled there: {reason}")),
            (Some(prefill), Some(decode), None) => notes.push(format!("{prefill} to {decode}")),
            _ => {}
        }
        let notes = if notes.is_empty() {
            String::new()
        } else {
            format!(" ({})", notes.join("; "))
        };
        format!("{}{notes}", parts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_that_is_known_is_in_the_line() {
        let metrics = serde_json::json!({
            "queue_ms": 0.21, "prefill_ms": 31.0, "kv_transfer_ms": 4.06, "ttft_ms": 37.94, "tokens_per_second": 41.3,
            "prefill_node": "prefill-0", "decode_node": "decode-0", "local_prefill": null, "something_new": [1]
        });
        let metrics: Metrics = serde_json::from_value(metrics).expect("the keys fit");
        let usage = Usage {
            prompt_tokens: 12,
            completion_tokens: 28,
        };
        assert_eq!(
            Timings::start().line(Some(&metrics), Some(&usage)),
            "queue 0.2 ms, prefill 31.0 ms, transfer 4.1 ms, first token 37.9 ms, 41.3 tokens/s \
             (12 prompt, 28 output tokens; prefill-0 to decode-0)"
        );
    }

    #[test]
    fn without_metrics_the_clients_own_measure_stands_in() {
        let mut timings = Timings::start();
        timings.on_text();
        assert!(timings.line(None, None).starts_with("first token "));
    }
}
