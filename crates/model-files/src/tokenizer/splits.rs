//! Where texts can be cut into two parts that are both known. The time is that of sorting the texts, also when they are long.

use std::cmp::Ordering;

/// How parts are compared with the texts that begin, or end, with them.
struct Side {
    /// The byte at this side; an empty text has none.
    edge: fn(&str) -> Option<u8>,
    /// In this order all texts that have a part at this side follow the part, without another between them.
    order: fn(&str, &str) -> Ordering,
    has: fn(&str, &str) -> bool,
}

const LEFT: Side = Side {
    edge: |text| text.bytes().next(),
    order: |a, b| a.cmp(b),
    has: |text, part| text.starts_with(part),
};
const RIGHT: Side = Side {
    edge: |text| text.bytes().next_back(),
    order: |a, b| a.bytes().rev().cmp(b.bytes().rev()),
    has: |text, part| text.ends_with(part),
};

/// For each of `texts` the places, ascending, at which both sides are among `parts`.
pub(super) fn splits(texts: &[&str], parts: &[&str]) -> Vec<Vec<usize>> {
    let mut left = vec![Vec::new(); texts.len()];
    each_part((texts, parts), &LEFT, &mut |index, bytes| left[index].push(bytes));
    let mut both = vec![Vec::new(); texts.len()];
    each_part((texts, parts), &RIGHT, &mut |index, bytes| {
        let place = texts[index].len() - bytes;
        // The parts of a text come in the order of their lengths.
        if left[index].binary_search(&place).is_ok() {
            both[index].push(place);
        }
    });
    both.iter_mut().for_each(|places| places.reverse());
    both
}

/// Gives the index of each text with the bytes of each shorter part that it has at that side, the shortest part first.
fn each_part((texts, parts): (&[&str], &[&str]), side: &Side, found: &mut dyn FnMut(usize, usize)) {
    // Few tokens of a vocabulary begin or end as an unused one does. The others need not be sorted.
    let mut edges = [false; 256];
    for edge in texts.iter().filter_map(|text| (side.edge)(text)) {
        edges[usize::from(edge)] = true;
    }
    let is_near = |part: &&&str| (side.edge)(part).is_some_and(|edge| edges[usize::from(edge)]);
    let parts = parts.iter().filter(is_near).map(|part| (*part, None));
    let texts = texts.iter().enumerate().map(|(index, text)| (*text, Some(index)));
    let mut all: Vec<(&str, Option<usize>)> = parts.chain(texts).collect();
    all.sort_unstable_by(|a, b| (side.order)(a.0, b.0).then(a.1.cmp(&b.1)));
    all.dedup();
    // The parts that the last text had, each one at the side of the next.
    let mut open: Vec<&str> = Vec::new();
    for (text, index) in all {
        while open.last().is_some_and(|part| !(side.has)(text, part)) {
            open.pop();
        }
        match index {
            None => open.push(text),
            Some(index) => {
                let shorter = open.iter().filter(|part| part.len() < text.len());
                shorter.for_each(|part| found(index, part.len()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition.
    fn simple(text: &str, parts: &[&str]) -> Vec<usize> {
        let places = text.char_indices().skip(1).map(|(at, _)| at);
        places
            .filter(|&at| parts.contains(&&text[..at]) && parts.contains(&&text[at..]))
            .collect()
    }

    #[test]
    fn a_text_is_cut_between_two_parts_and_never_at_its_ends() {
        let parts = ["", "a", "ab", "abc", "bc", "c", "é"];
        let cut = |text| splits(&[text], &parts).remove(0);
        assert_eq!(cut("abc"), [1, 2]);
        assert_eq!(cut("éa"), [2]);
        for text in ["", "a", "xab", "abx"] {
            assert_eq!(cut(text), Vec::<usize>::new(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn the_places_are_those_of_the_definition(
            texts in prop::collection::vec("[abé]{0,7}", 0..12),
            parts in prop::collection::vec("[abé]{0,5}", 0..24),
        ) {
            let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
            let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
            let expected: Vec<_> = texts.iter().map(|text| simple(text, &parts)).collect();
            prop_assert_eq!(splits(&texts, &parts), expected);
        }
    }
}
