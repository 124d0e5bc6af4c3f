//! Sessions of the console. A browser has a cookie in place of the key, so that no script of a page can read the key.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::secret::{KeyHash, random_text};

/// A working day. A session also ends with its key.
pub(crate) const SESSION_TIME: Duration = Duration::from_secs(12 * 3600);
/// One more ends the oldest one of the same key: nobody signs others out.
const SESSIONS_OF_A_KEY_MAX: usize = 20;

#[derive(Debug)]
struct Session {
    cookie: KeyHash,
    key: KeyHash,
    ends_at: Instant,
}

/// Oldest first. A key that is no longer in the file leaves at most its own number for at most their time.
#[derive(Debug, Default)]
pub(super) struct Sessions(VecDeque<Session>);

impl Sessions {
    pub fn begin(&mut self, key: KeyHash, now: Instant) -> String {
        let cookie = random_text();
        let of_key = |session: &Session| session.key.is(&key);
        if self.0.iter().filter(|session| of_key(session)).count() >= SESSIONS_OF_A_KEY_MAX
            && let Some(oldest) = self.0.iter().position(of_key)
        {
            self.0.remove(oldest);
        }
        self.0.push_back(Session {
            cookie: KeyHash::of(&cookie),
            key,
            ends_at: now + SESSION_TIME,
        });
        cookie
    }

    /// The key of a session.
    pub fn find(&mut self, cookie: &str, now: Instant) -> Option<KeyHash> {
        self.0.retain(|session| session.ends_at > now);
        let wanted = KeyHash::of(cookie);
        let mut found = None;
        for session in &self.0 {
            if session.cookie.is(&wanted) {
                found = Some(session.key);
            }
        }
        found
    }

    pub fn end(&mut self, cookie: &str) {
        let wanted = KeyHash::of(cookie);
        self.0.retain(|session| !session.cookie.is(&wanted));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_session_too_many_ends_the_oldest_of_its_key() {
        let (mut sessions, now) = (Sessions::default(), Instant::now());
        let (key, other) = (KeyHash::of("key"), KeyHash::of("other"));
        let of_other = sessions.begin(other, now);
        let first = sessions.begin(key, now);
        let second = sessions.begin(key, now);
        for _ in 1..SESSIONS_OF_A_KEY_MAX {
            sessions.begin(key, now);
        }
        assert!(sessions.find(&first, now).is_none());
        assert!(sessions.find(&second, now).is_some());
        assert!(sessions.find(&of_other, now).is_some());
        assert_eq!(sessions.0.len(), SESSIONS_OF_A_KEY_MAX + 1);
    }
}
