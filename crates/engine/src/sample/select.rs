//! The k best of a row of logits without sorting it: a vocabulary of 49,152 is scanned once, against a rising threshold.

use std::cmp::Ordering;

/// Best first; equal logits go to the lower id.
fn best_first(a: &(f32, u32), b: &(f32, u32)) -> Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// Slots of the buffer beyond 2k, so that a small k does not select after every few hits.
const SLACK: usize = 64;

/// Leaves the `k` best `(logit, id)` in `kept`, best first. `kept` grows to `2k + 64` at most; NaN must not occur.
pub(crate) fn best(logits: &[f32], k: usize, kept: &mut Vec<(f32, u32)>) {
    kept.clear();
    let k = k.min(logits.len());
    if k == 0 {
        return;
    }
    let room = 2 * k + SLACK;
    // A later token with the threshold's own logit has the higher id and loses the tie, so strictly above is right.
    let mut bar = f32::NEG_INFINITY;
    let mut open = true;
    for (id, logit) in (0u32..).zip(logits) {
        if open || *logit > bar {
            // Adding zero turns -0 into +0. The two are equal logits and must tie.
            kept.push((*logit + 0.0, id));
            if kept.len() == room {
                kept.select_nth_unstable_by(k - 1, best_first);
                kept.truncate(k);
                bar = kept[k - 1].0;
                open = false;
            }
        }
    }
    if kept.len() > k {
        kept.select_nth_unstable_by(k - 1, best_first);
        kept.truncate(k);
    }
    kept.sort_unstable_by(best_first);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn equals_a_full_sort(
            // Few distinct values, so that there are many ties.
            logits in prop::collection::vec((-4i8..4).prop_map(|v| f32::from(v) * 0.5), 1..2_000),
            k in 0usize..300,
        ) {
            let mut sorted: Vec<(f32, u32)> = (0u32..).zip(&logits).map(|(id, logit)| (*logit, id)).collect();
            sorted.sort_by(|a, b| b.0.partial_cmp(&a.0).unwrap().then(a.1.cmp(&b.1)));
            sorted.truncate(k);
            let mut kept = Vec::new();
            best(&logits, k, &mut kept);
            prop_assert_eq!(kept, sorted);
        }
    }

    #[test]
    fn rising_logits_and_negative_zero() {
        let rising: Vec<f32> = (0..10_000).map(|i| i as f32).collect();
        let mut kept = Vec::new();
        best(&rising, 3, &mut kept);
        assert_eq!(kept, [(9_999.0, 9_999), (9_998.0, 9_998), (9_997.0, 9_997)]);
        best(&[-0.0, 0.0, -0.0], 2, &mut kept);
        assert_eq!(kept.iter().map(|entry| entry.1).collect::<Vec<_>>(), [0, 1]);
    }
}
