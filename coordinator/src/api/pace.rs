//! When an answer's tokens were sent: TTFT, the gaps between tokens, TPOT, and both egress stages.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serving_core::request::Lane;
use serving_core::stage::Stage;

use super::record::RequestRecord;
use super::run::OutToken;
use super::shapes::EdgeTimes;
use crate::records::stalls::{Gaps, Left};

/// The clock of a running answer. Without a connection's own stamps, or without streaming, a token counts as written when
/// it is handed over.
pub struct Pace {
    record: Arc<RequestRecord>,
    lane: Lane,
    /// The trace id for the exemplars of its gaps.
    trace_id: String,
    choices: Vec<ChoicePace>,
    gaps: Gaps,
    first: Option<First>,
    /// When the last chunk was handed to the connection. Until the connection asks again, it is writing.
    handed_over: Option<Instant>,
    writing: Duration,
}

#[derive(Clone, Copy, Debug, Default)]
struct ChoicePace {
    first: Option<Instant>,
    last: Option<Left>,
    tokens: u32,
}

#[derive(Clone, Copy, Debug)]
struct First {
    received_at: Instant,
    written_at: Option<Instant>,
}

impl Pace {
    pub fn new(record: Arc<RequestRecord>, lane: Lane, choice_count: usize) -> Self {
        let trace_id = record.facts().trace.trace_id_hex();
        Self {
            record,
            lane,
            trace_id,
            choices: vec![ChoicePace::default(); choice_count],
            gaps: Gaps::default(),
            first: None,
            handed_over: None,
            writing: Duration::ZERO,
        }
    }

    /// The connection asks for the next chunk, so it has taken the last one.
    pub fn asked(&mut self) {
        if let Some(since) = self.handed_over.take() {
            self.writing += since.elapsed();
        }
        if let (Some(first), Some(connection)) = (&mut self.first, &self.record.connection)
            && first.written_at.is_none()
        {
            first.written_at = connection.awaited_write();
        }
    }

    /// A token's chunk goes to the connection now.
    pub fn token(&mut self, out: &OutToken) {
        let now = Instant::now();
        if self.first.is_none() {
            if let Some(connection) = &self.record.connection {
                connection.await_write();
            }
            self.first = Some(First {
                received_at: out.times.received_at,
                written_at: None,
            });
        } else {
            self.handed_over = Some(now);
        }
        let left = Left {
            times: out.times,
            at: now,
        };
        let mut since_last = None;
        if let Some(choice) = self.choices.get_mut(out.choice as usize) {
            if let Some(last) = choice.last {
                let gap = now.duration_since(last.at);
                since_last = Some(gap);
                self.record.metrics().token_gap(self.lane, gap, &self.trace_id);
                self.gaps.add((out.choice, choice.tokens), last, left);
            }
            choice.first.get_or_insert(now);
            choice.last = Some(left);
            choice.tokens += 1;
        }
        // With `max_tokens: 0` a step without a token carries the echo.
        let is_token = out.token.is_some();
        if is_token {
            self.record.insight().records.rates.token(now, since_last);
        }
        if self.record.insight().traces_content {
            self.record.update(|generation| {
                if let Some(content) = &mut generation.content {
                    content.said(out.choice, &out.text, out.finish);
                }
            });
        }
        if is_token && self.record.token_left() {
            let received_at = self.record.received_at;
            // A preliminary value: at the end of the answer it is known when the token was written.
            self.record.update(|generation| {
                generation.ttft = Some(now.saturating_duration_since(received_at));
            });
            self.record.tell();
        }
    }

    /// The figures at the end of the answer. They are put into the record as well.
    pub fn close(&mut self, is_streaming: bool) -> EdgeTimes {
        self.asked();
        let received_at = self.record.received_at;
        let first = self.first.map(|first| {
            let written_at = if is_streaming {
                first.written_at
            } else {
                Some(first.received_at)
            };
            (
                first.received_at,
                written_at.unwrap_or_else(|| self.first_handed_over(first.received_at)),
            )
        });
        let ttft = first.map(|(_, written)| written.saturating_duration_since(received_at));
        let tpot = self.choices.iter().filter_map(ChoicePace::tpot).max();
        let (mut stages, mut unattributed_ms) = (serving_core::stage::StageTimings::default(), None);
        let writing = self.writing;
        let gaps = self.gaps.clone();
        self.record.update(|generation| {
            generation.gaps = gaps;
            generation.ttft = ttft;
            generation.tpot = tpot;
            if let Some((received, written)) =
                first.filter(|_| is_streaming && generation.edge.get(Stage::Egress).is_none())
            {
                generation
                    .edge
                    .push(Stage::Egress, written.saturating_duration_since(received));
                generation.edge.push(Stage::EgressRest, writing);
            }
            stages = generation.stages();
            unattributed_ms = generation.unattributed_ms();
        });
        EdgeTimes {
            ttft,
            e2e: received_at.elapsed(),
            stages,
            unattributed_ms,
        }
    }

    /// The end of the answer goes to the connection now.
    pub fn ended(&self) {
        let last = self.choices.iter().filter_map(|choice| Some(choice.last?.at)).max();
        if let Some(last) = last {
            let received_at = self.record.received_at;
            let until_now = received_at.elapsed();
            self.record.update(|generation| {
                // A single token of a stream left when it was written, which is its TTFT.
                let ttft = generation.ttft.unwrap_or_default();
                let last_token = last.saturating_duration_since(received_at).max(ttft);
                generation.last_token = Some(last_token);
                generation.last_token_to_end = Some(until_now.saturating_sub(last_token));
            });
        }
    }

    fn first_handed_over(&self, received_at: Instant) -> Instant {
        self.choices
            .iter()
            .filter_map(|choice| choice.first)
            .min()
            .unwrap_or(received_at)
    }
}

impl ChoicePace {
    fn tpot(&self) -> Option<Duration> {
        let gaps = self.tokens.checked_sub(1).filter(|gaps| *gaps > 0)?;
        Some(self.last?.at.saturating_duration_since(self.first?) / gaps)
    }
}
