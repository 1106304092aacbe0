//! Declares messages: struct, decoder and encoder of one field list.
//!
//! A field ends in its rule in brackets: `[required]`, or `[or DEFAULT]` for what an absent field
//! becomes, then optionally `since PROFILE`, `until PROFILE` for where it exists, or `needed since
//! PROFILE` for an `Option` that must have a value there.

/// Whether a field with this rule is part of the profile.
macro_rules! is_in_profile {
    ([required] $profile:expr) => {
        true
    };
    ([or $default:expr] $profile:expr) => {
        true
    };
    ([or $default:expr, since $first:ident] $profile:expr) => {
        $profile >= $crate::protocol::Profile::$first
    };
    ([or $default:expr, needed since $first:ident] $profile:expr) => {
        $profile >= $crate::protocol::Profile::$first
    };
    ([or $default:expr, until $last:ident] $profile:expr) => {
        $profile <= $crate::protocol::Profile::$last
    };
}

/// The value of an absent array element, or the error that it is missing.
macro_rules! absent_element {
    ([required] $elements:ident $field:ident) => {
        return Err($elements.missing(stringify!($field)))
    };
    ([or $default:expr $(, $($rest:tt)*)?] $elements:ident $field:ident) => {
        $default
    };
}

/// The value of an element that the profile does not have.
macro_rules! default_of {
    ([required] $($name:tt)*) => {
        $($name)*
    };
    ([or $default:expr $(, $($rest:tt)*)?] $($name:tt)*) => {
        $default
    };
}

/// The value of an absent key, or the error that it is missing.
macro_rules! absent_key {
    ([required] $key:expr) => {
        return Err($crate::protocol::codec::DecodeError::from(
            $crate::protocol::codec::DecodeProblem::MissingKey,
        )
        .in_field($key))
    };
    ([or $default:expr $(, $($rest:tt)*)?] $key:expr) => {
        $default
    };
}

/// Whether a map leaves out this value: it equals its default.
macro_rules! entry_is_default {
    ([required] $value:expr) => {
        false
    };
    ([or $default:expr $(, $($rest:tt)*)?] $value:expr) => {
        *$value == $default
    };
}

/// Reports a field that lacks the value which the profile needs.
macro_rules! check_needed {
    ([or $default:expr, needed since $first:ident] $value:expr, $key:expr, $writer:ident) => {
        if $writer.profile() >= $crate::protocol::Profile::$first && $value.is_none() {
            let profile = $writer.profile();
            $writer
                .fail($crate::protocol::codec::EncodeError::MissingField { field: $key, profile });
        }
    };
    ([$($rule:tt)*] $value:expr, $key:expr, $writer:ident) => {};
}

/// The key of a field: its name, unless it has another on the wire.
macro_rules! key {
    ($field:ident) => {
        stringify!($field)
    };
    ($field:ident $key:literal) => {
        $key
    };
}

/// Number of elements in a profile.
macro_rules! array_len {
    ($profile:expr, $($rule:tt)+) => {
        0 $(+ usize::from(is_in_profile!($rule $profile)))+
    };
}

/// The fields of a message as data, and a message of foreign fields.
macro_rules! wire_record {
    ($Name:ident { $($field:ident $(as $key:literal)?: $type:ty [$($rule:tt)*];)+ }) => {
        impl $crate::protocol::codec::Record for $Name {
            fn name(&self) -> &'static str {
                stringify!($Name)
            }

            fn parts(&self) -> Vec<(&'static str, $crate::protocol::codec::Part<'_>)> {
                vec![$((
                    key!($field $($key)?),
                    $crate::protocol::codec::Visible::part(&self.$field),
                )),+]
            }
        }

        impl $crate::protocol::codec::Visible for $Name {
            fn part(&self) -> $crate::protocol::codec::Part<'_> {
                $crate::protocol::codec::Part::Record(self)
            }

            fn from_source<S: $crate::protocol::codec::Source>(
                source: &S,
            ) -> $crate::protocol::codec::DecodeResult<Self> {
                if let Some(native) = source.native::<Self>() {
                    return Ok(native);
                }
                Ok(Self {
                    $($field: match source.field(key!($field $($key)?))? {
                        Some(value) => {
                            <$type as $crate::protocol::codec::Visible>::from_source(&value)
                                .map_err(|error| error.in_field(key!($field $($key)?)))?
                        }
                        None => absent_key!([$($rule)*] key!($field $($key)?)),
                    },)+
                })
            }
        }
    };
}

/// A message that is an array of fields by position.
macro_rules! wire_array {
    (
        $(#[$meta:meta])*
        pub struct $Name:ident {
            $($(#[$field_meta:meta])* $field:ident: $type:ty [$($rule:tt)*];)+
        }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq)]
        pub struct $Name {
            $($(#[$field_meta])* pub $field: $type,)+
        }

        impl Default for $Name {
            fn default() -> Self {
                Self { $($field: default_of!([$($rule)*] Default::default()),)+ }
            }
        }

        wire_record! { $Name { $($field: $type [$($rule)*];)+ } }

        impl $Name {
            /// Elements of the array in a wire profile.
            #[must_use]
            pub fn num_elements(profile: $crate::protocol::Profile) -> usize {
                let _ = profile;
                array_len!(profile, $([$($rule)*])+)
            }
        }

        impl $crate::protocol::codec::Wire for $Name {
            fn read(
                reader: &mut $crate::protocol::codec::Reader<'_>,
            ) -> $crate::protocol::codec::DecodeResult<Self> {
                let mut elements = reader.elements(concat!("an array, ", stringify!($Name)))?;
                $(
                    let $field: $type = if !is_in_profile!([$($rule)*] reader.profile()) {
                        default_of!([$($rule)*] return Err(elements.missing(stringify!($field))))
                    } else if elements.take() {
                        <$type as $crate::protocol::codec::Wire>::read(reader)
                            .map_err(|error| error.in_field(stringify!($field)))?
                    } else {
                        absent_element!([$($rule)*] elements $field)
                    };
                )+
                reader.skip_extra(&elements)?;
                Ok(Self { $($field),+ })
            }

            fn write(&self, writer: &mut $crate::protocol::codec::Writer) {
                writer.array_len(Self::num_elements(writer.profile()));
                $(
                    if is_in_profile!([$($rule)*] writer.profile()) {
                        $crate::protocol::codec::Wire::write(&self.$field, writer);
                    }
                )+
            }
        }
    };
}

/// A message that is a map of fields by name, of which those that equal their default are left out.
macro_rules! wire_sparse_map {
    (
        $(#[$meta:meta])*
        pub struct $Name:ident {
            $($(#[$field_meta:meta])* $field:ident $(as $key:literal)?: $type:ty [$($rule:tt)*];)+
        }
    ) => {
        wire_map_struct! {
            $(#[$meta])*
            pub struct $Name { $($(#[$field_meta])* $field $(as $key)?: $type [$($rule)*];)+ }
        }

        impl $Name {
            /// Writes the entries that `select` asks for, given key and whether the value is the
            /// default; returns their number.
            fn write_entries(
                &self,
                writer: &mut $crate::protocol::codec::Writer,
                select: impl Fn(&'static str, bool) -> bool,
            ) -> u16 {
                let mut num_entries = 0;
                $(
                    let is_default = entry_is_default!([$($rule)*] &self.$field);
                    if is_in_profile!([$($rule)*] writer.profile())
                        && select(key!($field $($key)?), is_default)
                    {
                        writer.str(key!($field $($key)?));
                        $crate::protocol::codec::Wire::write(&self.$field, writer);
                        num_entries += 1;
                    }
                )+
                num_entries
            }
        }
    };
}

/// A message that is a map of fields by name. All keys are written.
macro_rules! wire_map {
    (
        $(#[$meta:meta])*
        pub struct $Name:ident {
            $($(#[$field_meta:meta])* $field:ident $(as $key:literal)?: $type:ty [$($rule:tt)*];)+
        }
    ) => {
        wire_map_struct! {
            $(#[$meta])*
            pub struct $Name { $($(#[$field_meta])* $field $(as $key)?: $type [$($rule)*];)+ }
        }

        impl $crate::protocol::codec::Wire for $Name {
            fn read(
                reader: &mut $crate::protocol::codec::Reader<'_>,
            ) -> $crate::protocol::codec::DecodeResult<Self> {
                Self::read_entries(reader)
            }

            fn write(&self, writer: &mut $crate::protocol::codec::Writer) {
                writer.map_len(array_len!(writer.profile(), $([$($rule)*])+));
                $(
                    check_needed!([$($rule)*] self.$field, key!($field $($key)?), writer);
                    if is_in_profile!([$($rule)*] writer.profile()) {
                        writer.str(key!($field $($key)?));
                        $crate::protocol::codec::Wire::write(&self.$field, writer);
                    }
                )+
            }
        }
    };
}

/// The struct and the decoder of a message that is a map.
macro_rules! wire_map_struct {
    (
        $(#[$meta:meta])*
        pub struct $Name:ident {
            $($(#[$field_meta:meta])* $field:ident $(as $key:literal)?: $type:ty [$($rule:tt)*];)+
        }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq)]
        pub struct $Name {
            $($(#[$field_meta])* pub $field: $type,)+
        }

        impl Default for $Name {
            fn default() -> Self {
                Self { $($field: default_of!([$($rule)*] Default::default()),)+ }
            }
        }

        wire_record! { $Name { $($field $(as $key)?: $type [$($rule)*];)+ } }

        impl $Name {
            fn read_entries(
                reader: &mut $crate::protocol::codec::Reader<'_>,
            ) -> $crate::protocol::codec::DecodeResult<Self> {
                let len = reader.map_len(concat!("a map, ", stringify!($Name)))?;
                $(let mut $field: Option<$type> = None;)+
                for index in 0..len {
                    match reader.str().map_err(|error| error.at_index(index))? {
                        $(
                            key!($field $($key)?) => {
                                let value = <$type as $crate::protocol::codec::Wire>::read(reader)
                                    .map_err(|error| error.in_field(key!($field $($key)?)))?;
                                $field = Some(value);
                            }
                        )+
                        _ => {
                            reader.skipped.add_key();
                            reader.skip().map_err(|error| error.at_index(index))?;
                        }
                    }
                }
                Ok(Self {
                    $($field: match $field {
                        Some(value) => value,
                        None => absent_key!([$($rule)*] key!($field $($key)?)),
                    },)+
                })
            }
        }
    };
}

/// An enumeration that is an integer on the wire.
macro_rules! wire_enum {
    (
        $(#[$meta:meta])*
        pub enum $Name:ident { $($(#[$member_meta:meta])* $Member:ident = $number:literal,)+ }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $Name { $($(#[$member_meta])* $Member = $number,)+ }

        impl $Name {
            /// Every member.
            pub const ALL: &'static [Self] = &[$(Self::$Member),+];

            /// The member's number on the wire.
            #[must_use]
            pub const fn number(self) -> u8 {
                match self { $(Self::$Member => $number,)+ }
            }

            /// The member with this number.
            #[must_use]
            pub const fn from_number(number: u8) -> Option<Self> {
                match number { $($number => Some(Self::$Member),)+ _ => None }
            }
        }

        impl $Name {
            fn of_int(found: i128) -> $crate::protocol::codec::DecodeResult<Self> {
                u8::try_from(found).ok().and_then(Self::from_number).ok_or_else(|| {
                    $crate::protocol::codec::DecodeProblem::UnknownMember {
                        enumeration: stringify!($Name),
                        found: found.to_string(),
                    }
                    .into()
                })
            }
        }

        impl $crate::protocol::codec::Visible for $Name {
            fn part(&self) -> $crate::protocol::codec::Part<'_> {
                let (enumeration, number) = (stringify!($Name), self.number());
                $crate::protocol::codec::Part::Member { enumeration, number }
            }

            fn from_source<S: $crate::protocol::codec::Source>(
                source: &S,
            ) -> $crate::protocol::codec::DecodeResult<Self> {
                source.int().and_then(Self::of_int)
            }
        }

        impl $crate::protocol::codec::Wire for $Name {
            fn read(
                reader: &mut $crate::protocol::codec::Reader<'_>,
            ) -> $crate::protocol::codec::DecodeResult<Self> {
                reader.int().and_then(Self::of_int)
            }

            fn write(&self, writer: &mut $crate::protocol::codec::Writer) {
                writer.u32(u32::from(self.number()));
            }
        }
    };
}
