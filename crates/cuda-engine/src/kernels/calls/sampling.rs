//! Calls of the kernels that draw tokens, and the records that they read and write.

use engine::SampleInput;
use serving_core::ids::TokenId;

use super::{Call, CallError, in_range};
use crate::kernels::driver::DevicePtr;
use crate::kernels::table::KernelId;

/// Bytes of the records as the kernels read them.
pub const ADJUSTMENT_BYTES: usize = 20;
pub const EDIT_BYTES: usize = 16;
pub const DRAW_BYTES: usize = 40;
pub const DRAWN_BYTES: usize = 8;
/// The sampler of the host counts exactly up to this size, too.
const VOCABULARY_MAX: u32 = 1 << 23;

const HAS_BIAS: u32 = 1;
const IS_MASKED: u32 = 2;
const IS_REPEATED: u32 = 4;

/// The change of one token's logit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Edit {
    pub token: u32,
    pub bias: Option<f32>,
    pub is_masked: bool,
    /// The repetition penalty looks at the token.
    pub is_repeated: bool,
    /// How often it is among the outputs.
    pub outputs: u32,
}

impl Edit {
    pub fn to_bytes(self) -> [u8; EDIT_BYTES] {
        let flag = |is_set, flag| if is_set { flag } else { 0 };
        let flags =
            flag(self.bias.is_some(), HAS_BIAS) | flag(self.is_masked, IS_MASKED) | flag(self.is_repeated, IS_REPEATED);
        words([self.token, self.bias.unwrap_or(0.0).to_bits(), flags, self.outputs])
    }

    /// Everything that step 2 of the host's definition (`engine::sample`) changes, each token once, by rising id.
    pub fn list(input: &SampleInput<'_>) -> Vec<Edit> {
        let params = input.params;
        let mut edits = std::collections::BTreeMap::new();
        let mut edit = |token: TokenId, change: &dyn Fn(&mut Edit)| {
            let fresh = Edit {
                token: token.0,
                ..Edit::default()
            };
            change(edits.entry(token.0).or_insert(fresh));
        };
        for (token, bias) in &params.logit_bias {
            edit(*token, &|edit| edit.bias = Some(*bias));
        }
        if input.output_index.0 < input.stop.min_tokens {
            for token in input.stop.end_tokens.iter().chain(&input.stop.stop_token_ids) {
                edit(*token, &|edit| edit.is_masked = true);
            }
        }
        if params.repetition_penalty != 1.0 {
            for token in input.prompt.iter().chain(input.outputs) {
                edit(*token, &|edit| edit.is_repeated = true);
            }
        }
        if params.frequency_penalty != 0.0 || params.presence_penalty != 0.0 {
            for token in input.outputs {
                edit(*token, &|edit| edit.outputs = edit.outputs.saturating_add(1));
            }
        }
        edits.into_values().collect()
    }
}

/// The edits of one row of logits, as a range of the list of all edits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adjustment {
    pub first_edit: u32,
    pub edits: u32,
    pub repetition_penalty: f32,
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
}

impl Adjustment {
    pub fn to_bytes(self) -> [u8; ADJUSTMENT_BYTES] {
        words([
            self.first_edit,
            self.edits,
            self.repetition_penalty.to_bits(),
            self.frequency_penalty.to_bits(),
            self.presence_penalty.to_bits(),
        ])
    }
}

/// One token to draw from a row of logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    pub seed: u64,
    pub choice: u32,
    pub output_index: u32,
    pub logits_row: u32,
    pub top_k: Option<u32>,
    pub temperature: f32,
    pub top_p: f32,
    pub min_p: f32,
}

impl Draw {
    pub fn of(input: &SampleInput<'_>, logits_row: u32) -> Self {
        Self {
            seed: input.seed,
            choice: input.choice.0,
            output_index: input.output_index.0,
            logits_row,
            top_k: input.params.top_k,
            temperature: input.params.temperature,
            top_p: input.params.top_p,
            min_p: input.params.min_p,
        }
    }

    pub fn to_bytes(self) -> [u8; DRAW_BYTES] {
        words([
            self.seed as u32,
            (self.seed >> 32) as u32,
            self.choice,
            self.output_index,
            self.logits_row,
            // The kernel's 0 is "all"; the host takes a top_k of 0 for 1.
            self.top_k.map_or(0, |k| k.max(1)),
            self.temperature.to_bits(),
            self.top_p.to_bits(),
            self.min_p.to_bits(),
            0,
        ])
    }
}

/// What became of a draw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drawn {
    Token(TokenId),
    /// The model gave this token no usable logit.
    NotFinite(TokenId),
    NothingLeft,
}

impl Drawn {
    /// `None`: the kernel wrote something that it never writes.
    pub fn from_bytes(bytes: [u8; DRAWN_BYTES]) -> Option<Self> {
        let [a, b, c, d, e, f, g, h] = bytes;
        let token = TokenId(u32::from_le_bytes([a, b, c, d]));
        match u32::from_le_bytes([e, f, g, h]) {
            0 => Some(Drawn::Token(token)),
            1 => Some(Drawn::NotFinite(token)),
            2 => Some(Drawn::NothingLeft),
            _ => None,
        }
    }
}

fn words<const WORDS: usize, const BYTES: usize>(words: [u32; WORDS]) -> [u8; BYTES] {
    const { assert!(WORDS * 4 == BYTES) };
    let mut bytes = [0; BYTES];
    for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// Looks for logits that are no numbers, then applies the edits, in place.
#[derive(Clone, Copy, Debug)]
pub struct PrepareLogits {
    /// f32 `[row][vocabulary]`.
    pub logits: DevicePtr,
    /// `Adjustment`s, one for each row.
    pub adjustments: DevicePtr,
    pub edits: DevicePtr,
    /// u32 for each row, for [`DrawTokens`].
    pub status: DevicePtr,
    pub rows: u32,
    pub vocab: u32,
}

impl PrepareLogits {
    /// # Errors
    /// [`CallError`].
    pub fn call(&self) -> Result<Call, CallError> {
        let kernel = KernelId::PrepareLogits;
        in_range(kernel, ("tokens", self.vocab.into()), VOCABULARY_MAX.into())?;
        Call::new(kernel, [self.rows, 1, 1])
            .pointer(self.logits)
            .pointer(self.adjustments)
            .pointer(self.edits)
            .pointer(self.status)
            .u32(self.vocab)
            .checked()
    }
}

/// Draws tokens from prepared rows. Rows that ask for log-probabilities go to the host instead.
#[derive(Clone, Copy, Debug)]
pub struct DrawTokens {
    pub logits: DevicePtr,
    pub status: DevicePtr,
    /// `Draw`s.
    pub draws: DevicePtr,
    /// `Drawn`s.
    pub drawn: DevicePtr,
    pub count: u32,
    pub vocab: u32,
}

impl DrawTokens {
    /// # Errors
    /// [`CallError`].
    pub fn call(&self) -> Result<Call, CallError> {
        let kernel = KernelId::DrawTokens;
        in_range(kernel, ("tokens", self.vocab.into()), VOCABULARY_MAX.into())?;
        Call::new(kernel, [self.count, 1, 1])
            .pointer(self.logits)
            .pointer(self.status)
            .pointer(self.draws)
            .pointer(self.drawn)
            .u32(self.vocab)
            .checked()
    }
}
