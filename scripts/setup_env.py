# placeholder, replaced in the set-up work
