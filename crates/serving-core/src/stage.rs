//! The closed list of stages a request's time is taken apart into, and the durations measured for them.

use std::time::Duration;

use serde::{Deserialize, Serialize};

macro_rules! stages {
    ($($(#[$doc:meta])* $variant:ident = $name:literal),* $(,)?) => {
        /// Each stage is measured where it happens, but for `FirstTokenReturn`, which lies between two processes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum Stage { $($(#[$doc])* $variant),* }

        impl Stage {
            pub const ALL: &'static [Stage] = &[$(Stage::$variant),*];
            pub fn name(self) -> &'static str { match self { $(Stage::$variant => $name),* } }
        }
    };
}

stages! {
    /// Coordinator: bytes of the body to a validated request, without tokenizing.
    Parse = "parse",
    /// Coordinator: chat template and tokenizer.
    Tokenize = "tokenize",
    /// Coordinator: waiting for permits and a place.
    Queue = "queue",
    /// Coordinator: choosing the nodes.
    Route = "route",
    /// Decode node: `Open` sent to `Opened` received, as the coordinator sees it.
    Reserve = "reserve",
    /// Coordinator: `Prefill` (or local prefill) sent to accepted by the node.
    Dispatch = "dispatch",
    /// Prefill side: accepted to the end of the step that ran then. A step that runs takes nobody in.
    StepWait = "step_wait",
    /// Prefill side: accepted, or the end of that step, to first chunk scheduled.
    PrefillQueue = "prefill_queue",
    /// Prefill side: first chunk scheduled to first token sampled.
    PrefillForward = "prefill_forward",
    /// First token sampled to received by the coordinator.
    FirstTokenReturn = "first_token_return",
    /// Coordinator: first token received to written to the client's socket.
    Egress = "egress",
    /// After the first token: last forward ended to last KV frame written.
    TransferTail = "transfer_tail",
    /// Decode node: last frame received to blocks verified and committed.
    Commit = "commit",
    /// Decode node: committed to joined the running batch.
    DecodeQueue = "decode_queue",
    /// Decode node: joined the batch to last token sampled.
    Decode = "decode",
    /// Coordinator: writing the tokens after the first to the client.
    EgressRest = "egress",
}

impl Stage {
    /// `ttft` for the stages before the first byte, `rest` after: `egress` occurs in both.
    pub fn phase(self) -> &'static str {
        if self.is_before_first_token() { "ttft" } else { "rest" }
    }
    /// Stages before the first byte sum to TTFT (with `unattributed`, a field of its own).
    pub fn is_before_first_token(self) -> bool {
        self <= Stage::Egress
    }
}

/// Durations of the stages of one attempt. A stage absent from the list was not passed through.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageTimings(pub Vec<(Stage, Duration)>);

impl StageTimings {
    pub fn push(&mut self, stage: Stage, duration: Duration) {
        self.0.push((stage, duration));
    }
    /// Total time recorded for `stage`; `None` when it was never recorded.
    pub fn get(&self, stage: Stage) -> Option<Duration> {
        let mut total = None;
        for (s, d) in &self.0 {
            if *s == stage {
                total = Some(total.unwrap_or(Duration::ZERO) + *d);
            }
        }
        total
    }
    /// Lengthens a stage that was passed through.
    pub fn lengthen(&mut self, stage: Stage, by: Duration) {
        if let Some((_, duration)) = self.0.iter_mut().find(|(s, _)| *s == stage) {
            *duration += by;
        }
    }
    pub fn extend(&mut self, other: &StageTimings) {
        self.0.extend_from_slice(&other.0);
    }
}
