//! In which order the arms run: A-B-B-A for two, a Latin square for three and more. And in which order they ran.

use workload::comparison::{Arm, ArmRun};

/// One list of arms for each repeat. Whatever changes with time (heat, other programs) then strikes every arm alike.
///
/// The rows are those of Williams (1949, "Experimental designs balanced for the estimation of residual effects"): over `arms`
/// rows each arm has each place once. For an even number of arms each arm also follows each other arm equally often after `arms`
/// rows, for an odd number after twice as many, because the second half has the rows of the first half backwards.
pub(super) fn rounds(arms: usize, repeats: u32) -> Vec<Vec<usize>> {
    let first: Vec<usize> = (0..arms)
        .map(|place| match place % 2 {
            1 => place.div_ceil(2),
            _ => (arms - place / 2) % arms,
        })
        .collect();
    let row = |repeat: usize| -> Vec<usize> {
        let shifted = first.iter().map(|arm| (arm + repeat) % arms.max(1));
        let is_mirrored = arms % 2 == 1 && (repeat / arms) % 2 == 1;
        match is_mirrored {
            true => shifted.rev().collect(),
            false => shifted.collect(),
        }
    };
    (0..repeats as usize).map(row).collect()
}

/// The order in words, for the plan that is shown before the first run.
pub(super) fn words(arms: usize, repeats: u32) -> String {
    match (arms, repeats as usize) {
        (0 | 1, _) => "one arm only".to_owned(),
        (2, _) => "A-B-B-A".to_owned(),
        (_, repeats) if repeats % arms == 0 => "Latin square (Williams)".to_owned(),
        (_, repeats) if repeats < arms => format!("{repeats} of {arms} rows of a Latin square (Williams)"),
        (_, repeats) => format!("Latin square (Williams), then {} of its {arms} rows", repeats % arms),
    }
}

/// The arms of each repeat as they ran, by their places in `arms`. `None`: the repeats are mixed, or one of them lacks an arm or has
/// an arm twice.
pub(super) fn real_rounds(runs: &[&ArmRun], arms: &[Arm]) -> Option<Vec<Vec<usize>>> {
    let place = |run: &&ArmRun| arms.iter().position(|arm| arm.name == run.arm);
    let mut rounds = Vec::new();
    for repeat in runs.chunk_by(|a, b| a.repeat == b.repeat) {
        let round: Vec<usize> = repeat.iter().map(place).collect::<Option<_>>()?;
        let has_each_once = round.len() == arms.len() && (0..arms.len()).all(|arm| round.contains(&arm));
        if !has_each_once {
            return None;
        }
        rounds.push(round);
    }
    Some(rounds)
}

/// Whether no arm has a place more often than in a Latin square, so that no arm is always the first.
pub(super) fn is_balanced(rounds: &[Vec<usize>]) -> bool {
    let arms = rounds.first().map_or(0, Vec::len);
    let most = rounds.len().div_ceil(arms.max(1));
    let times = |place: usize, arm: usize| rounds.iter().filter(|round| round.get(place) == Some(&arm)).count();
    (0..arms).all(|place| (0..arms).all(|arm| times(place, arm) <= most))
}

/// `A-B-B-A`
pub(super) fn letters(rounds: &[Vec<usize>]) -> String {
    let letters: Vec<String> = rounds.iter().flatten().map(|arm| letter(*arm)).collect();
    letters.join("-")
}

/// `A` for the first arm; a number for those behind the alphabet.
pub(super) fn letter(arm: usize) -> String {
    const ALPHABET: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
    ALPHABET.get(arm..=arm).map_or(arm.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::compare::test_kit;

    #[test]
    fn the_real_order_is_that_of_the_runs() {
        let comparison = test_kit::comparison();
        let mut runs: Vec<&ArmRun> = comparison.shapes[0].runs.iter().collect();
        let found = |runs: &[&ArmRun]| real_rounds(runs, &comparison.arms);
        assert_eq!(found(&runs), Some(rounds(2, 3)));
        assert_eq!(letters(&rounds(2, 3)), "A-B-B-A-A-B");
        runs.swap(1, 2);
        assert_eq!(found(&runs), None, "two repeats are mixed");
        runs.swap(1, 2);
        assert_eq!(found(&runs[..5]), None, "an arm is missing");
    }

    #[test]
    fn every_planned_order_is_balanced_and_one_in_which_an_arm_is_always_first_is_not() {
        for (arms, repeats) in [(2, 3), (2, 4), (3, 3), (3, 5), (4, 3), (5, 12)] {
            assert!(is_balanced(&rounds(arms, repeats)), "{arms} arms, {repeats} repeats");
        }
        assert!(!is_balanced(&[vec![0, 1], vec![0, 1], vec![0, 1]]));
    }

    #[test]
    fn two_arms_run_a_b_b_a() {
        assert_eq!(rounds(2, 4), [[0, 1], [1, 0], [0, 1], [1, 0]]);
        assert_eq!(words(2, 3), "A-B-B-A");
        assert!(words(3, 3).starts_with("Latin") && words(4, 3).starts_with("3 of 4"));
        assert!(words(3, 5).contains("2 of its 3"), "{}", words(3, 5));
        assert_eq!(rounds(1, 2), [[0], [0]]);
        assert!(rounds(0, 2).iter().all(Vec::is_empty));
    }

    #[test]
    fn each_arm_has_each_place_once_in_as_many_rounds_as_there_are_arms() {
        for arms in 1..8 {
            let rows = rounds(arms, arms as u32);
            for place in 0..arms {
                let mut seen: Vec<usize> = rows.iter().map(|row| row[place]).collect();
                seen.sort_unstable();
                assert_eq!(seen, (0..arms).collect::<Vec<_>>(), "{arms} arms, place {place}");
            }
            for row in rows {
                let mut row = row.clone();
                row.sort_unstable();
                assert_eq!(row, (0..arms).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn each_arm_follows_each_other_arm_equally_often() {
        for arms in 2..8_usize {
            let repeats = if arms % 2 == 0 { arms } else { 2 * arms };
            let mut follows = BTreeMap::new();
            for row in rounds(arms, repeats as u32) {
                for pair in row.windows(2) {
                    *follows.entry((pair[0], pair[1])).or_insert(0) += 1;
                }
            }
            let counts: Vec<i32> = follows.values().copied().collect();
            assert_eq!(counts.len(), arms * (arms - 1), "{arms} arms: every pair is there");
            assert!(
                counts.iter().all(|count| *count == counts[0]),
                "{arms} arms: {follows:?}"
            );
        }
    }
}
