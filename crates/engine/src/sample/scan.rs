//! Passes over a whole row of logits, sixteen at a time. One at a time, each comparison would wait for the one before:
//! with three passes over a vocabulary of 49,152 the sampling of a greedy token would take seven times as long.

/// The lanes of an AVX-512 register. Narrower registers take a chunk in two or four parts.
const LANES: usize = 16;

/// Index of the first logit that `is_wanted`.
pub(super) fn first(logits: &[f32], is_wanted: impl Fn(f32) -> bool) -> Option<usize> {
    let (chunks, _) = logits.as_chunks::<LANES>();
    // There is no early exit inside a chunk, so the compiler can compare the whole chunk at once.
    let has_one = |chunk: &[f32; LANES]| chunk.iter().fold(false, |found, logit| found | is_wanted(*logit));
    let from = chunks.iter().position(has_one).unwrap_or(chunks.len()) * LANES;
    let within = logits[from..].iter().position(|logit| is_wanted(*logit));
    within.map(|index| from + index)
}

/// The largest logit and its id, the lowest id on a tie. NaN must not occur. For an empty row: minus infinity.
pub(super) fn largest(logits: &[f32]) -> (f32, u32) {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (chunks, rest) = logits.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for (lane, logit) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, *logit);
        }
    }
    let best = lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, larger);
    let id = first(logits, |logit| logit == best).unwrap_or(0);
    (logits.get(id).copied().unwrap_or(best), id as u32)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn equals_one_by_one(
            // Few distinct values, so that there are many ties, also between the two zeros.
            logits in prop::collection::vec((-3i8..4).prop_map(|v| f32::from(v) * -0.5), 1..200),
            wanted in -4i8..5,
        ) {
            let wanted = f32::from(wanted) * 0.5;
            prop_assert_eq!(first(&logits, |logit| logit == wanted), logits.iter().position(|logit| *logit == wanted));
            let mut best = (f32::NEG_INFINITY, 0);
            for (id, logit) in (0u32..).zip(&logits) {
                if *logit > best.0 {
                    best = (*logit, id);
                }
            }
            prop_assert_eq!(largest(&logits), best);
            prop_assert_eq!(largest(&logits).0.to_bits(), best.0.to_bits());
        }
    }

    #[test]
    fn rows_without_anything() {
        assert_eq!(largest(&[]), (f32::NEG_INFINITY, 0));
        assert_eq!(largest(&[f32::NEG_INFINITY; 40]), (f32::NEG_INFINITY, 0));
        assert_eq!(first(&[], |_| true), None);
        assert_eq!(first(&[0.0, f32::NAN], f32::is_nan), Some(1));
    }
}
