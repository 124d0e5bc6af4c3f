//! Shapes with names, which reports cite: the five of a comparison, and the rows A to F of the matrix. Their lengths are scaled
//! down together when the model's context is shorter than the longest of them.

use super::prefixes::SharedPrefixes;
use super::{Kind, Length, Mix, ShapeError};
use crate::trace::Trace;

/// Users of a sweep, unless others are asked for.
pub const USERS: [u32; 4] = [1, 5, 10, 20];
/// Lengths of the production mix vary by half.
const MIX_RANGE_RATIO: f64 = 0.5;
const PREFIX_BLOCK_TOKENS: u32 = 16;
/// Of the row with a shared prefix: this part of its prompt is the prefix.
const PREFIX_PART: f64 = 0.75;

/// A shape of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamedShape {
    PrefillHeavy,
    Balanced,
    DecodeHeavy,
    Short,
    /// Nine requests of ten are short prompts with long answers, the tenth is a long prompt.
    LongBesideStreams,
}

impl NamedShape {
    pub const ALL: [Self; 5] = [
        Self::PrefillHeavy,
        Self::Balanced,
        Self::DecodeHeavy,
        Self::Short,
        Self::LongBesideStreams,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::PrefillHeavy => "prefill-heavy",
            Self::Balanced => "balanced",
            Self::DecodeHeavy => "decode-heavy",
            Self::Short => "short",
            Self::LongBesideStreams => "long-beside-streams",
        }
    }

    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|shape| shape.name() == name)
    }

    /// Weight, prompt and answer of each kind of request, before scaling.
    fn kinds(self) -> &'static [(u32, u32, u32)] {
        match self {
            Self::PrefillHeavy => &[(1, 5_000, 250)],
            Self::Balanced => &[(1, 1_000, 1_000)],
            Self::DecodeHeavy => &[(1, 256, 1_024)],
            Self::Short => &[(1, 200, 200)],
            Self::LongBesideStreams => &[(9, 200, 400), (1, 5_000, 50)],
        }
    }

    /// The shape for a model. All five are scaled by one factor, so that they stay comparable.
    pub fn mix(self, context_tokens_max: u32) -> Mix {
        let longest = Self::ALL.iter().flat_map(|shape| shape.kinds());
        let factor = factor(longest.map(|(_, prompt, output)| prompt + output), context_tokens_max);
        let kind = |(weight, prompt, output): &(u32, u32, u32)| Kind {
            weight: *weight,
            prompt: Length::exactly(scaled(*prompt, factor)),
            output: Length::exactly(scaled(*output, factor)),
        };
        Mix {
            kinds: self.kinds().iter().map(kind).collect(),
        }
    }
}

/// A row of the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixRow {
    A,
    B,
    C,
    D,
    E,
    F,
}

impl MatrixRow {
    pub const ALL: [Self; 6] = [Self::A, Self::B, Self::C, Self::D, Self::E, Self::F];

    pub fn name(self) -> &'static str {
        match self {
            Self::A => "A: short prompt, short answer",
            Self::B => "B: long prompt, short answer",
            Self::C => "C: short prompt, long answer",
            Self::D => "D: long prompt, long answer, 8 users",
            Self::E => "E: shared prefix, warm, 16 users",
            Self::F => "F: production mix",
        }
    }

    /// Users of the closed loop. `None`: an open loop, whose rate the caller gives.
    pub fn users(self) -> Option<u32> {
        match self {
            Self::A | Self::B | Self::C => Some(1),
            Self::D => Some(8),
            Self::E => Some(16),
            Self::F => None,
        }
    }

    /// Prompt and answer before scaling.
    fn lengths(self) -> (u32, u32) {
        match self {
            Self::A | Self::F => (256, 128),
            Self::B => (2_048, 128),
            Self::C => (256, 1_024),
            Self::D => (2_048, 1_024),
            Self::E => (4_096, 256),
        }
    }

    fn scaled_lengths(self, context_tokens_max: u32) -> (u32, u32) {
        // F is a mix of A to D whose lengths vary upwards.
        let longest = [4_096 + 256, (f64::from(2_048 + 1_024) * (1.0 + MIX_RANGE_RATIO)) as u32];
        let factor = factor(longest.into_iter(), context_tokens_max);
        let (prompt, output) = self.lengths();
        (scaled(prompt, factor), scaled(output, factor))
    }

    /// The measured requests, and those that warm the cache before them.
    pub fn traces(
        self,
        context_tokens_max: u32,
        requests: usize,
        seed: u64,
    ) -> Result<(Trace, Option<Trace>), ShapeError> {
        let (prompt, output) = self.scaled_lengths(context_tokens_max);
        match self {
            Self::E => {
                let prefix_tokens = (f64::from(prompt) * PREFIX_PART) as u32;
                let block_tokens = PREFIX_BLOCK_TOKENS.min(prefix_tokens.max(1));
                let rest = prompt - prefix_tokens / block_tokens * block_tokens;
                let shape = SharedPrefixes {
                    prefixes: 1,
                    prefix_tokens,
                    block_tokens,
                    rest: Length::exactly(rest),
                    output: Length::exactly(output),
                };
                Ok((shape.trace(requests, seed)?, Some(shape.warm_up()?)))
            }
            Self::F => Ok((production_mix(context_tokens_max).trace(requests, seed)?, None)),
            _ => Ok((
                Mix::one(Length::exactly(prompt), Length::exactly(output)).trace(requests, seed)?,
                None,
            )),
        }
    }
}

/// Rows A to D, the short ones more often. The weights are ours: a user's own trace is better than any mix.
fn production_mix(context_tokens_max: u32) -> Mix {
    let rows = [
        (5, MatrixRow::A),
        (2, MatrixRow::B),
        (2, MatrixRow::C),
        (1, MatrixRow::D),
    ];
    let kinds = rows.map(|(weight, row)| {
        let (prompt, output) = row.scaled_lengths(context_tokens_max);
        let length = |tokens| Length {
            tokens,
            range_ratio: MIX_RANGE_RATIO,
        };
        Kind {
            weight,
            prompt: length(prompt),
            output: length(output),
        }
    });
    Mix { kinds: kinds.to_vec() }
}

/// At most 1. Two tokens of room are left for rounding upwards.
fn factor(lengths: impl Iterator<Item = u32>, context_tokens_max: u32) -> f64 {
    let longest = lengths.max().unwrap_or(1);
    (f64::from(context_tokens_max.saturating_sub(2)) / f64::from(longest)).min(1.0)
}

fn scaled(tokens: u32, factor: f64) -> u32 {
    ((f64::from(tokens) * factor) as u32).max(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_long_context_has_the_lengths_of_the_design() {
        let mix = NamedShape::PrefillHeavy.mix(8_192);
        assert_eq!(
            (mix.kinds[0].prompt, mix.kinds[0].output),
            (Length::exactly(5_000), Length::exactly(250))
        );
        let lengths = |row: MatrixRow| {
            let (trace, _) = row.traces(8_192, 1, 0).expect("the row is possible");
            (trace.requests[0].prompt_tokens, trace.requests[0].output_tokens)
        };
        let rows = [MatrixRow::A, MatrixRow::B, MatrixRow::C, MatrixRow::D, MatrixRow::E];
        let expected = [(256, 128), (2_048, 128), (256, 1_024), (2_048, 1_024), (4_096, 256)];
        assert_eq!(rows.map(lengths), expected);
    }

    #[test]
    fn the_warm_row_finds_its_prefix() {
        let (trace, warm_up) = MatrixRow::E.traces(2_048, 3, 0).expect("the row is possible");
        let warm_up = warm_up.expect("the row is warm");
        assert!(
            trace
                .requests
                .iter()
                .all(|request| request.prefix_blocks == warm_up.requests[0].prefix_blocks)
        );
        assert!(warm_up.requests[0].prefix_blocks.len() > 80);
    }

    #[test]
    fn names_are_found() {
        for shape in NamedShape::ALL {
            assert_eq!(NamedShape::of_name(shape.name()), Some(shape));
        }
        assert_eq!(NamedShape::of_name("other"), None);
    }

    proptest! {
        /// Each shape and each row fits every context of at least 32 tokens.
        #[test]
        fn all_shapes_fit_the_context(context in 32_u32..20_000, seed in any::<u64>()) {
            let named = NamedShape::ALL.map(|shape| shape.mix(context).trace(50, seed).map(|trace| (trace, None)));
            let rows = MatrixRow::ALL.map(|row| row.traces(context, 50, seed));
            for traces in named.into_iter().chain(rows) {
                let (trace, warm_up) = traces.expect("the context is long enough");
                let requests = trace.requests.iter().chain(warm_up.iter().flat_map(|trace| &trace.requests));
                for request in requests {
                    prop_assert!(request.prompt_tokens + request.output_tokens <= context, "{context}: {request:?}");
                }
            }
        }
    }
}
