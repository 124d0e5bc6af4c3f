//! Keeps the cached prompts of tenants apart. Whose prompts are cached shows in the time to the first token, so a request finds only
//! those of its own tenant.

use std::fmt;

use serving_core::ids::{CacheTenant, PrefixSalt};
use sha2::{Digest as _, Sha256};

use super::file::ClientKey;
use super::secret::CacheSecret;

/// So that no other use of SHA-256 gives the same value.
const DOMAIN: &[u8] = b"baton prefix salt\0";
const CACHE_TENANT_DOMAIN: &[u8] = b"baton cache tenant\0";

/// A tenant's share of the salts of its requests. It is the same on every coordinator with the same file of keys, and nobody who lacks
/// the file's secret can compute it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TenantSalt([u8; 32]);

impl TenantSalt {
    /// A key without a tenant shares with no other, whatever another's tenant is called, and whoever had its name before.
    pub(super) fn of(secret: Option<&CacheSecret>, key: &ClientKey) -> Self {
        let mut hash = Sha256::new();
        hash.update(DOMAIN);
        hash.update(secret.map_or(&[][..], CacheSecret::bytes));
        hash.update(match &key.tenant {
            Some(tenant) => format!("\0tenant\0{tenant}"),
            None => format!("\0key\0{}", key.sha256),
        });
        Self(hash.finalize().into())
    }

    /// As whose the tenant's cached blocks are counted on the nodes. It says nothing about the salts.
    pub(crate) fn cache_tenant(self) -> CacheTenant {
        let hash = Sha256::new().chain_update(CACHE_TENANT_DOMAIN).chain_update(self.0);
        CacheTenant(first_word(hash.finalize().into()))
    }
}

impl fmt::Debug for TenantSalt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TenantSalt(..)")
    }
}

/// The salt of a request's cached prefixes; `cache_salt` is the hash of the client's own, which narrows them further. `None`: nobody is
/// told apart.
pub(crate) fn prefix_salt(tenant: Option<TenantSalt>, cache_salt: Option<[u8; 32]>) -> Option<PrefixSalt> {
    if tenant.is_none() && cache_salt.is_none() {
        return None;
    }
    let mut hash = Sha256::new();
    hash.update(DOMAIN);
    for part in [tenant.map(|tenant| tenant.0), cache_salt] {
        hash.update([u8::from(part.is_some())]);
        hash.update(part.as_ref().map_or(&[][..], |part| part.as_slice()));
    }
    Some(PrefixSalt(first_word(hash.finalize().into())))
}

/// So much of a hash tells owners and tenants apart.
pub(super) fn first_word(hash: [u8; 32]) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = hash;
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

#[cfg(test)]
mod tests {
    use super::super::file::Limits;
    use super::super::secret::KeyHash;
    use super::super::test_kit::entry;
    use super::*;

    fn key(name: &str, tenant: Option<&str>) -> ClientKey {
        ClientKey {
            tenant: tenant.map(|tenant| tenant.parse().expect("a name")),
            ..entry(name, name, Limits::default())
        }
    }

    #[test]
    fn each_tenant_and_each_salt_of_a_client_has_its_own() {
        let secret = CacheSecret::random();
        let of = |name, tenant| Some(TenantSalt::of(Some(&secret), &key(name, tenant)));
        // A key that is called as the tenant of others is not of that tenant.
        let tenants = [
            None,
            of("a", None),
            of("b", None),
            of("c", Some("a")),
            of("c", Some("b")),
        ];
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
        let again = ClientKey {
            sha256: KeyHash::of("a new key of the same name"),
            ..key("a", None)
        };
        assert_ne!(of("a", None), Some(TenantSalt::of(Some(&secret), &again)));
        assert_eq!(seen[0], None, "as it is without keys and without a salt");
        assert_eq!(of("c", Some("a")), of("d", Some("a")), "two keys of one tenant");
        let counted = tenants.map(|tenant| tenant.map(TenantSalt::cache_tenant));
        for (number, tenant) in counted.iter().enumerate() {
            assert!(!counted[..number].contains(tenant), "{:?}", tenants[number]);
        }
        let elsewhere = TenantSalt::of(Some(&CacheSecret::random()), &key("c", Some("a")));
        assert_ne!(of("c", Some("a")), Some(elsewhere), "another cluster's secret");
    }
}
