//! A map of limited size. What has not been used for longest goes first.

use std::collections::HashMap;
use std::hash::Hash;

#[derive(Debug)]
pub struct Recent<K, V> {
    entries: HashMap<K, (u64, V)>,
    most: usize,
    uses: u64,
}

impl<K: Eq + Hash + Clone, V> Recent<K, V> {
    /// Keeps up to `most` entries, at least one.
    pub fn new(most: usize) -> Self {
        Self {
            entries: HashMap::new(),
            most: most.max(1),
            uses: 0,
        }
    }

    pub fn get(&mut self, key: &K) -> Option<&mut V> {
        self.uses += 1;
        let (used, value) = self.entries.get_mut(key)?;
        *used = self.uses;
        Some(value)
    }

    pub fn insert(&mut self, key: K, value: V) {
        self.uses += 1;
        if self.entries.len() >= self.most && !self.entries.contains_key(&key) {
            let oldest = self.entries.iter().min_by_key(|(_, (used, _))| *used);
            if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                self.entries.remove(&oldest);
            }
        }
        self.entries.insert(key, (self.uses, value));
    }

    pub fn remove(&mut self, key: &K) {
        self.entries.remove(key);
    }

    pub fn retain(&mut self, mut is_kept: impl FnMut(&K) -> bool) {
        self.entries.retain(|key, _| is_kept(key));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entry_that_was_not_used_for_longest_goes() {
        let mut recent = Recent::new(2);
        recent.insert("a", 1);
        recent.insert("b", 2);
        assert_eq!(recent.get(&"a"), Some(&mut 1));
        recent.insert("c", 3);
        assert_eq!(recent.get(&"b"), None);
        recent.insert("a", 4);
        assert_eq!(
            (recent.get(&"a").copied(), recent.get(&"c").copied()),
            (Some(4), Some(3))
        );
    }
}
