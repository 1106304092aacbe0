//! Named wire profiles: which fields a vLLM release puts where.
//!
//! The wire is positional and fields were inserted in the middle, so both ends must agree on one.

use std::fmt;
use std::str::FromStr;

use thiserror::Error as ThisError;

/// The wire of one range of vLLM releases. Later profiles compare greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Profile {
    /// vLLM 0.24 and 0.25: requests of 20 fields, outputs of 13 in batches of 8.
    V0_25,
    /// vLLM 0.26 to 0.31: outputs of 14 fields. 0.26.0 is the release that was looked at.
    V0_26,
    /// vLLM 0.32: requests of 22 fields, outputs of 18 in batches of 9.
    #[default]
    V0_32,
    /// vLLM 0.33 and later: outputs of 19 fields.
    V0_33,
}

/// A text that names no wire profile.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum ProfileError {
    /// Not one of [`Profile::ALL`].
    #[error("unknown wire profile {name:?}; known are 0.25, 0.26, 0.32 and 0.33")]
    UnknownName {
        /// The name as given.
        name: String,
    },
    /// A vLLM version that is no `MAJOR.MINOR` number.
    #[error("vLLM version {version:?} is no MAJOR.MINOR number; name a wire profile instead")]
    UnreadableVersion {
        /// The version as given.
        version: String,
    },
    /// A vLLM version older than the oldest profile.
    #[error("vLLM {version} is older than 0.24, the first version whose wire is known")]
    TooOld {
        /// The version as given.
        version: String,
    },
}

impl Profile {
    /// Every profile, oldest first.
    pub const ALL: [Self; 4] = [Self::V0_25, Self::V0_26, Self::V0_32, Self::V0_33];

    /// The profile's name, such as `0.32`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::V0_25 => "0.25",
            Self::V0_26 => "0.26",
            Self::V0_32 => "0.32",
            Self::V0_33 => "0.33",
        }
    }

    /// The profile of the engine that reports this `vllm_version`.
    ///
    /// Versions between two profiles take the older one, later ones take the latest.
    ///
    /// # Errors
    ///
    /// [`ProfileError::UnreadableVersion`] if the text does not begin with two numbers,
    /// [`ProfileError::TooOld`] below 0.24.
    pub fn of_vllm_version(version: &str) -> Result<Self, ProfileError> {
        let unreadable = || ProfileError::UnreadableVersion { version: version.to_owned() };
        let mut parts = version.strip_prefix('v').unwrap_or(version).split('.');
        let mut number = || parts.next().and_then(leading_number).ok_or_else(unreadable);
        match (number()?, number()?) {
            (0, ..24) => Err(ProfileError::TooOld { version: version.to_owned() }),
            (0, 24 | 25) => Ok(Self::V0_25),
            (0, 26..32) => Ok(Self::V0_26),
            (0, 32) => Ok(Self::V0_32),
            _ => Ok(Self::V0_33),
        }
    }
}

fn leading_number(part: &str) -> Option<u32> {
    let end = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
    part.get(..end)?.parse().ok()
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Profile {
    type Err = ProfileError;

    fn from_str(name: &str) -> Result<Self, ProfileError> {
        Self::ALL
            .into_iter()
            .find(|profile| profile.name() == name)
            .ok_or_else(|| ProfileError::UnknownName { name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_reads_back_as_itself() {
        for profile in Profile::ALL {
            assert_eq!(profile.to_string().parse(), Ok(profile));
        }
    }

    #[test]
    fn rejects_a_name_between_two_profiles() {
        let error = "0.31".parse::<Profile>().unwrap_err();
        assert_eq!(error, ProfileError::UnknownName { name: "0.31".to_owned() });
    }

    #[test]
    fn versions_take_the_profile_of_their_release() {
        let cases = [
            ("0.24.0", Profile::V0_25),
            ("0.25.1", Profile::V0_25),
            ("0.26.0", Profile::V0_26),
            ("0.31.2", Profile::V0_26),
            ("0.32.0+cpu", Profile::V0_32),
            ("v0.32.1rc1", Profile::V0_32),
            ("0.33.0", Profile::V0_33),
            ("0.34.dev1", Profile::V0_33),
            ("1.0.0", Profile::V0_33),
        ];
        for (version, profile) in cases {
            assert_eq!(Profile::of_vllm_version(version), Ok(profile), "{version}");
        }
    }

    #[test]
    fn rejects_versions_that_are_too_old_or_unreadable() {
        let too_old = ProfileError::TooOld { version: "0.9.2".to_owned() };
        assert_eq!(Profile::of_vllm_version("0.9.2"), Err(too_old));
        for version in ["", "X", "dev", "0", "0.x"] {
            let unreadable = ProfileError::UnreadableVersion { version: version.to_owned() };
            assert_eq!(Profile::of_vllm_version(version), Err(unreadable));
        }
    }
}
