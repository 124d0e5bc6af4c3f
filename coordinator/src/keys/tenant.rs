//! Keeps the cached prompts of tenants apart. Whose prompts are cached shows in the time to the first token, so a request finds only
//! those of its own tenant.

use serving_core::ids::PrefixSalt;
use sha2::{Digest as _, Sha256};

use super::file::KeyName;

/// So that no other use of SHA-256 gives the same value.
const DOMAIN: &[u8] = b"baton prefix salt\0";

/// The salt of a request's cached prefixes; `cache_salt` is the hash of the client's own, which narrows them further. It is the same
/// on every coordinator. `None`: nobody is told apart.
pub(crate) fn prefix_salt(tenant: Option<&KeyName>, cache_salt: Option<[u8; 32]>) -> Option<PrefixSalt> {
    if tenant.is_none() && cache_salt.is_none() {
        return None;
    }
    let mut hash = Sha256::new();
    hash.update(DOMAIN);
    // A name is never empty and has no byte 0.
    hash.update(tenant.map_or("", KeyName::as_str));
    hash.update([0]);
    hash.update(cache_salt.as_ref().map_or(&[][..], |salt| salt.as_slice()));
    let [a, b, c, d, e, f, g, h, ..] = <[u8; 32]>::from(hash.finalize());
    Some(PrefixSalt(u64::from_le_bytes([a, b, c, d, e, f, g, h])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tenant_and_each_salt_of_a_client_has_its_own() {
        let names = ["a", "b"].map(|name| name.parse::<KeyName>().expect("a name"));
        let tenants = [None, Some(&names[0]), Some(&names[1])];
        let salts = [None, Some([0; 32]), Some([1; 32])];
        let mut seen = Vec::new();
        for tenant in tenants {
            for salt in salts {
                let found = prefix_salt(tenant, salt);
                assert!(!seen.contains(&found), "{tenant:?} {salt:?}");
                assert_eq!(found, prefix_salt(tenant, salt), "always the same");
                seen.push(found);
            }
        }
        assert_eq!(seen[0], None, "as it is without keys and without a salt");
    }
}
